"""The store of models: directories in the user's cache that were downloaded or converted once.

A directory of the store is complete or does not exist. A model is built in a hidden directory beside its final place,
written through to the disk and renamed. Only one process builds at a time. The remains of a killed process are never
listed or loaded; the next process removes them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from filelock import FileLock, Timeout

from skipdecode.common.files import cache_dir, give_usual_mode
from skipdecode.common.jsonl import Json
from skipdecode.common.progress import note
from skipdecode.errors import FetchError, WriteError

_SOURCE_FILE = "skipdecode-source.txt"


def cached_models() -> list[Json]:
    """The models of the store: name, path, bytes of all files, and the source of the weights in words."""
    root = _root()
    folders = [p for p in sorted(root.iterdir()) if p.is_dir() and not p.name.startswith(".")] if root.is_dir() else []
    sizes = (sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in folders)
    return [
        {"name": p.name, "path": str(p), "bytes": size, "source": source_of(p) or ""}
        for p, size in zip(folders, sizes, strict=True)
    ]


def source_of(folder: Path) -> str | None:
    """The source of the weights of a stored model in words; None for other directories."""
    file = folder / _SOURCE_FILE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


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
    for abandoned in root.glob(f".{name}.*.partial"):
        shutil.rmtree(abandoned)
    partial = root / f".{name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        source = build(partial)
        (partial / _SOURCE_FILE).write_text(source + "\n", encoding="utf-8")
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
