"""Where the files of a model lie: in a directory, on a hub, or in a store of model directories in the user's cache.

Without a network the hub's client retries for half a minute per file. One request with a short timeout distinguishes
"does not exist" from "not reachable" first.

A directory of the store is complete or does not exist. A model is built in a hidden directory beside its final place,
written through to the disk and renamed. Only one process builds at a time. The remains of a killed process are never
listed or loaded; the next process removes them.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from skipdecode.common.files import cache_dir, give_usual_mode
from skipdecode.common.jsonl import Json
from skipdecode.common.progress import note, without_foreign_bars
from skipdecode.errors import FetchError, ModelLoadError, WriteError

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
    asked, earlier = _unreachable.get(constants.ENDPOINT, (0.0, None))
    if earlier is not None and time.monotonic() - asked < _REMEMBERED_SECONDS:
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
    asked = [*patterns] if answer.state == "found" else []
    options: Json = {"revision": revision or None, "local_files_only": not asked}
    try:
        with without_foreign_bars(downloads=bars):
            return Path(snapshot_download(repo, allow_patterns=asked, ignore_patterns=["*/*"], **options))
    except Exception as e:  # also of the HTTP library under the client, whose classes differ between its versions
        if not asked and isinstance(e, LocalEntryNotFoundError):
            return None
        raise ModelLoadError(f"{name} cannot be fetched from the hub: {' '.join(str(e).split())[:200]}") from e


def beside(where: str | Path, name: str, revision: str | None = None) -> Path | None:
    """A file of a checkpoint in a directory, or of a hub id, from which it is fetched; None if there is none.

    Raises ModelLoadError: the hub does not say whether there is such a file.
    """
    if (folder := Path(where)).is_dir():
        found: Path | None = folder
    else:
        answer = ask_hub(known := f"{where}@{revision}" if revision else str(where))
        found = None if answer.state == "absent" else snapshot(known, [name], answer)
        if found is None and answer.state == "unreachable":
            raise ModelLoadError(f"{where}: the hub does not say whether it has {name}: {answer.reason}; try again")
    file = (found or folder) / name
    return file if file.exists() or file.is_symlink() else None


SOURCE_FILE = "skipdecode-source.txt"


def cached_models() -> list[Json]:
    """The models of the store: name, path, bytes of all files, and the source of the weights in words."""
    root = _root()
    found = [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")] if root.is_dir() else []
    sizes = (sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in found)
    return [
        {"name": p.name, "path": str(p), "bytes": size, "source": _source(p)}
        for p, size in zip(found, sizes, strict=True)
    ]


def stored_model(name: str) -> Path:
    """The directory of a model in the store, which may not have it."""
    return _root() / name


def add_model(name: str, build: Callable[[Path], str]) -> Path:
    """The directory of `name`; it is built first if the store does not have it.

    `build`: fills the given empty directory and returns the source of the weights in words.

    Raises FetchError if the store cannot be written.
    """
    final = stored_model(name)
    root = final.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", name):
            if not final.is_dir():
                _build(name, final, build)
    except (OSError, WriteError) as e:
        reason = getattr(e, "strerror", None) or e
        raise FetchError(
            f"{name} cannot be stored in {root}: {reason}; make room there, or set SKIPDECODE_CACHE to a directory you "
            "can write to"
        ) from e
    return final


def _root() -> Path:
    return cache_dir() / "models"


def _source(path: Path) -> str:
    file = path / SOURCE_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""


def _locked(path: Path, name: str) -> AbstractContextManager[object]:
    """A context that holds the builder's lock; prints a note if another process holds it."""
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        note(f"another process is preparing {name}; waiting for it")
        return lock.acquire()


def _build(name: str, final: Path, build: Callable[[Path], str]) -> None:
    root = final.parent
    for left in root.glob(f".{name}.*.partial"):
        shutil.rmtree(left)
    partial = root / f".{name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        source = build(partial)
        (partial / SOURCE_FILE).write_text(source + "\n", encoding="utf-8")
        give_usual_mode(partial)
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        partial.rename(final)
        _sync(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(path: Path) -> None:
    """Write a file or a directory through to the disk. Windows supports this for neither when opened like this."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
