"""Small files that are there whole or not at all, and where this package keeps those of its own."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from skipdecode.errors import OutputError, WriteError

__all__ = ["cache_dir", "check_place", "copy_files", "write_whole"]


def cache_dir() -> Path:
    """The cache directory: ``SKIPDECODE_CACHE``, else ``skipdecode`` in the platform's cache directory.

    The platform's is ``LOCALAPPDATA`` on Windows and elsewhere ``XDG_CACHE_HOME``, by default ``~/.cache``.
    """
    if own := os.environ.get("SKIPDECODE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "skipdecode"


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of one directory into another; each is there whole or not at all."""
    for file in sorted(source.iterdir()):
        if file.is_dir():  # such as a tokenizer's further chat templates
            (target / file.name).mkdir(exist_ok=True)
            copy_files(file, target / file.name)
            continue
        partial = target / f".{file.name}.partial"
        shutil.copy(file, partial)
        os.replace(partial, target / file.name)


def check_place(path: Path | str) -> None:
    """Refuse, before the work, a file that `write_whole` could not write after it.

    Raises
    ------
    OutputError
        It is a directory, or there is none that can be written to where it, or a directory for it, would be made.
    """
    path = Path(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a directory; name a file in it")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: {folder} is not a directory that can be written to")


def write_whole(path: Path | str, data: str | bytes) -> None:
    """Write a file in one step, its directory too if need be: readers see the old content or the new, never a part.

    Raises
    ------
    WriteError
        If it cannot be written; an existing file is then as it was.
    """
    path = Path(path)
    content = data.encode() if isinstance(data, str) else data
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; these are ordinary ones.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as e:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise WriteError(f"cannot write {path}: {e.strerror or e}") from None
