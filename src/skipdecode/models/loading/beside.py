"""The files that this package adds to a checkpoint: where they are found, in a directory or on the hub.

Without a network the hub's client retries for half a minute per file. One request with a short timeout distinguishes
"does not exist" from "not reachable" first.

The config of a checkpoint, or of an adapter, has the digest of its fit. So a fit that is missing, or is another one, is
noticed: the weights were tuned with it, and without it they give other text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from skipdecode.common.kinds import read_json
from skipdecode.errors import DataError, FitError, ModelLoadError
from skipdecode.models.carried import FIT_FILE, RECIPE_FILE

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
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        return HubAnswer("absent", "it has not the form of a hub id")
    asked, earlier = _unreachable.get(constants.ENDPOINT, (0.0, None))
    if earlier is not None and time.monotonic() - asked < _REMEMBERED_SECONDS:
        return earlier
    try:
        # To connect, to read, to write, to get a free connection: what the client's HTTP library takes.
        timeout: Any = (connect_seconds or TIMEOUT_SECONDS, *[TIMEOUT_SECONDS] * 3)
        info = HfApi().model_info(repo_id, timeout=timeout)
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


def beside(where: str | Path, name: str, revision: str | None = None) -> Path | None:
    """A file of a checkpoint; None if the checkpoint has no such file.

    Parameters
    ----------
    where : str or Path
        A directory, or a hub id, from which the file is fetched.
    name : str
        One of `skipdecode.models.carried.CHECKPOINT_FILES`.

    Raises ModelLoadError: the hub does not say whether there is such a file.
    """
    if Path(where).is_dir():
        file = Path(where) / name
        return file if file.exists() or file.is_symlink() else None
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    answer = ask_hub(str(where))
    if answer.state == "absent":  # another tool knows where it is
        return None
    if answer.state == "found":
        try:
            return Path(hf_hub_download(str(where), name, revision=revision))
        except Exception as e:  # also of the HTTP library under the client, whose classes differ between its versions
            if isinstance(e, EntryNotFoundError) and not isinstance(e, LocalEntryNotFoundError):
                return None
            reason = " ".join(str(e).split())[:200] or type(e).__name__
    else:
        kept, reason = try_to_load_from_cache(str(where), name, revision=revision), answer.reason
        if isinstance(kept, str):
            return Path(kept)
        if kept is not None or constants.HF_HUB_OFFLINE:  # known to be absent; or nobody can say
            return None
    raise ModelLoadError(f"{where}: the hub does not say whether it has {name}: {reason}; try again")


def fit_beside(where: str | Path, digest: str | None, revision: str | None = None) -> Path | None:
    """The file of a checkpoint's fit; None if it was tuned without one.

    `digest` is of the config. Raises FitError if the file is missing, and ModelLoadError as `beside`.
    """
    file = beside(where, FIT_FILE, revision)
    if file is None and (digest is not None or _tuned_with_fit(beside(where, RECIPE_FILE, revision))):
        raise FitError(
            f"{where} was tuned with a fit, and its {FIT_FILE} is missing: put the file back; to do without, delete "
            f"'skipdecode_fit' from its config and its {RECIPE_FILE}"
        )
    return file


def _tuned_with_fit(recipe: Path | None) -> bool:
    """Whether a recipe says that its run began with a fit, which its checkpoint then has too."""
    try:
        document: Any = None if recipe is None else read_json(recipe)
        return "exported" not in document and document["checkpoint"]["fit"] is not None
    except (DataError, KeyError, TypeError):  # told where the recipe is read
        return False
