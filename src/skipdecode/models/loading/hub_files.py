"""Files of models on a hub, with one question to the hub before its client is used.

Without a network the hub's client retries for half a minute per file. One request with a short timeout distinguishes
"does not exist" from "not reachable" first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skipdecode.common.jsonl import Json
from skipdecode.common.progress import without_foreign_bars
from skipdecode.errors import ModelLoadError

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


def ask_hub(name: str) -> HubAnswer:
    """Whether the hub has this model, ``owner/name`` or ``owner/name@revision``.

    One request, answered within seconds; none when offline mode is on, or when the hub could not be reached within the
    last minute.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils._validators import validate_repo_id

    repo_id, _, revision = name.partition("@")
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        return HubAnswer("absent", "it has not the form of a hub id")
    failed_at, earlier = _unreachable.get(constants.ENDPOINT, (0.0, None))
    if earlier is not None and time.monotonic() - failed_at < _REMEMBERED_SECONDS:
        return earlier
    try:
        info = HfApi().model_info(repo_id, revision=revision or None, timeout=TIMEOUT_SECONDS)
    except GatedRepoError:
        return HubAnswer(
            "absent", "the hub keeps it behind terms: accept them on its page and log in with 'hf auth login'"
        )
    except RepositoryNotFoundError:
        return HubAnswer("absent", "the hub has no such public model (a private one needs 'hf auth login')")
    except RevisionNotFoundError:
        return HubAnswer("absent", f"the hub's model has no revision {revision!r}")
    except OfflineModeIsEnabled:
        return HubAnswer("offline", "offline mode is on (HF_HUB_OFFLINE)")
    except Exception as e:  # The HTTP library under the client, and with it the class, differs between its versions.
        reason = f"the hub cannot be reached ({' '.join(str(e).split())[:120] or type(e).__name__})"
        answer = HubAnswer("unreachable", reason)
        _unreachable[constants.ENDPOINT] = time.monotonic(), answer
        return answer
    return HubAnswer("found", revision=info.sha)


def snapshot(name: str, patterns: Sequence[str], answer: HubAnswer, *, bars: bool = False) -> Path | None:
    """The directory in the hub's cache of a model (``owner/name`` or ``owner/name@revision``), once it has some files.

    `answer` is the hub's about the model. If it was not found, the cache is read as it is; None: it has no such model.

    Raises ModelLoadError: files cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repo, _, revision = name.partition("@")
    patterns_to_fetch = [*patterns] if answer.state == "found" else []
    options: Json = {"revision": revision or None, "local_files_only": not patterns_to_fetch}
    try:
        with without_foreign_bars(downloads=bars):
            return Path(snapshot_download(repo, allow_patterns=patterns_to_fetch, ignore_patterns=["*/*"], **options))
    except Exception as e:  # also of the HTTP library under the client, whose classes differ between its versions
        if not patterns_to_fetch and isinstance(e, LocalEntryNotFoundError):
            return None
        raise ModelLoadError(f"{name} cannot be fetched from the hub: {' '.join(str(e).split())[:200]}") from e


def find_file(where: str | Path, name: str, revision: str | None = None) -> Path | None:
    """A file of a checkpoint in a directory, or of a hub id, from which it is fetched; None if there is none.

    Raises ModelLoadError: the hub does not say whether there is such a file.
    """
    if (folder := Path(where)).is_dir():
        directory: Path | None = folder
    else:
        answer = ask_hub(known := f"{where}@{revision}" if revision else str(where))
        directory = None if answer.state == "absent" else snapshot(known, [name], answer)
        if directory is None and answer.state == "unreachable":
            raise ModelLoadError(f"{where}: the hub does not say whether it has {name}: {answer.reason}; try again")
    file = (directory or folder) / name
    return file if file.exists() or file.is_symlink() else None
