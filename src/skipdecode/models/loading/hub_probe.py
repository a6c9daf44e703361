"""One short request to the hub before any download.

Without a network the hub's client retries for half a minute per file. One request with a short timeout distinguishes
"does not exist" from "not reachable" first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

TIMEOUT_SECONDS = 5.0
_REMEMBERED_SECONDS = 60.0
_unreachable: dict[str, tuple[float, HubAnswer]] = {}  # by address, so that a command waits only once


@dataclass(frozen=True)
class HubAnswer:
    """The hub's answer about a model.

    `absent` includes models that this user may not read; `offline`: by a setting, the hub was not asked.

    `reason` is a text for users, empty if the model was found. `revision` is the commit of a found model.
    """

    state: Literal["found", "absent", "offline", "unreachable"]
    reason: str = ""
    revision: str | None = None


def ask_hub(repo_id: str, *, connect_seconds: float | None = None) -> HubAnswer:
    """Whether the hub has this model: one request, answered within seconds; none when offline mode is on, or when the
    hub could not be reached within the last minute.

    `connect_seconds` is how long it waits for a connection, and for its encryption.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError

    asked, earlier = _unreachable.get(constants.ENDPOINT, (0.0, None))
    if earlier is not None and time.monotonic() - asked < _REMEMBERED_SECONDS:
        return earlier
    try:
        # To connect, to read, to write, to get a free connection: what the client's HTTP library takes.
        timeout: Any = (connect_seconds or TIMEOUT_SECONDS, *[TIMEOUT_SECONDS] * 3)
        info = HfApi().model_info(repo_id, timeout=timeout)
    except HFValidationError:
        return HubAnswer("absent", "it has not the form of a hub id")
    except GatedRepoError:
        return HubAnswer(
            "absent", "the hub keeps it behind terms: accept them on its page and log in with 'hf auth login'"
        )
    except RepositoryNotFoundError:
        return HubAnswer("absent", "the hub has no such public model (a private one needs 'hf auth login')")
    except OfflineModeIsEnabled:
        return HubAnswer("offline", "offline mode is on (HF_HUB_OFFLINE)")
    except Exception as e:  # The HTTP library under the client, and with it the class, differs between its versions.
        reason = f"the hub cannot be reached ({' '.join(str(e).split())[:120] or type(e).__name__})"
        answer = HubAnswer("unreachable", reason)
        _unreachable[constants.ENDPOINT] = time.monotonic(), answer
        return answer
    return HubAnswer("found", revision=info.sha)
