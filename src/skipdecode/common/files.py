"""Atomic writes of small files, checks of output paths, directories of runs, locks, and the cache directory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from skipdecode.common.tables import byte_size
from skipdecode.errors import OutputError, SkipDecodeError, WriteError

PARTIAL = ".skipdecode-partial-"
"""How files and directories begin that are put into their place when they are whole."""
_MOST_LINKS = 40
# Of the system, and of torch and numpy, whose errors have no reason.
_FULL = re.compile(
    r"No space left on device|File too large|\w+ quota exceeded|os error \d+|inline_container|\d requested and \d",
    re.IGNORECASE,
)


def cache_dir() -> Path:
    """The cache directory: ``SKIPDECODE_CACHE``, else ``skipdecode`` in the cache directory of the platform.

    The latter is ``LOCALAPPDATA`` on Windows, elsewhere ``XDG_CACHE_HOME``, by default ``~/.cache``.
    """
    if configured := os.environ.get("SKIPDECODE_CACHE"):
        return Path(configured).expanduser()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "skipdecode"


def copy_files(source: Path, target: Path) -> None:
    """Copy the files of a directory into another; each file atomically."""
    for file in sorted(source.iterdir()):
        if file.is_dir():  # such as further chat templates of a tokenizer
            (target / file.name).mkdir(exist_ok=True)
            copy_files(file, target / file.name)
            continue
        partial = target / f"{PARTIAL}{file.name}"
        shutil.copy(file, partial)
        os.replace(partial, target / file.name)


def check_output(path: Path | str, name: str = "", *, overwrite: bool = True) -> None:
    """Refuse a path that `write_whole` could not write; for a check before long work.

    Raises OutputError: the path is a directory or a circular link, its parent directory cannot be written or created,
    or it exists and `overwrite` is not set. `name` is what the message calls it.
    """
    if is_stream(path):
        return
    file = linked(Path(path))
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if file.is_dir() or str(path).endswith(os.sep):
        raise OutputError(f"cannot write {path}: it is a directory; give a file in it")
    if file.is_symlink():
        raise OutputError(f"cannot write {path}: its link is circular")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {path}: {folder} is not a writable directory")
    if file.exists() and not overwrite:
        raise OutputError(f"{name or path} exists: give `overwrite` to replace it, or another name")


def linked(path: Path) -> Path:
    """The target of a symbolic link, or the path itself if it is not a link."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def is_stream(path: Path | str) -> bool:
    """Whether a path is ``-``, a device, a pipe, or an open file of this process: read once, and never replaced."""
    path = Path(path)
    is_special = path.exists() and not path.is_file() and not path.is_dir()
    return is_special or str(path) == "-" or _handle(path) is not None


def open_stream(path: Path | str) -> IO[bytes]:
    """Open a stream for writing; an open file of this process keeps its position. Raises OutputError."""
    try:
        handle = _handle(Path(path))
        if handle is None:
            return Path(path).open("wb")
        sys.stdout.flush()
        return os.fdopen(os.dup(handle), "wb")
    except OSError as e:
        raise OutputError(f"cannot write {path}: {e.strerror or e}") from None


def _handle(path: Path) -> int | None:
    """The file descriptor of this process that a path stands for, such as /dev/stdout; None for other paths."""
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent), path.name)
        if str(path.parent) in ("/dev/fd", f"/proc/{os.getpid()}/fd") and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            break
        path = path.parent / path.readlink()
    return None


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that replaces `path` at the end, in one step; if the block fails, nothing changes.

    The directory is created if necessary. For a symbolic link, its target is replaced. Raises OSError.
    """
    path = linked(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{PARTIAL}{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        give_usual_mode(Path(temporary))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def give_usual_mode(path: Path) -> None:
    """Give a file, or the files of a directory, the permissions of a new file; some libraries write private files."""
    mask = os.umask(0)
    os.umask(mask)
    for file in (path, *path.rglob("*")):
        if file.is_file():
            file.chmod(0o666 & ~mask)


def write_whole(path: Path | str, data: str | bytes) -> None:
    """Write a file in one step (see `replaced`): readers see the old or the new content, never a part.

    Raises WriteError if it cannot be written; an existing file is then unchanged.
    """
    try:
        with open_stream(path) if is_stream(path) else replaced(Path(path)) as file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as e:
        raise _write_error(path, e, len(data)) from None


@contextlib.contextmanager
def writing(path: Path, needed: int = 0) -> Iterator[None]:
    """Raise WriteError, with the file, its size and the room left, if a library cannot write.

    safetensors, tokenizers and torch report a full disk by errors of many classes.

    `path`: the file that the error names. `needed`: its bytes, if they are known.
    """
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as e:
        if not isinstance(e, OSError) and _FULL.search(str(e)) is None:
            raise
        raise _write_error(path, e, needed) from e


def _write_error(path: Path | str, error: Exception, needed: int) -> WriteError:
    """Make the error of a failed write; if the disk is full, with the bytes needed and free."""
    reason = str(getattr(error, "strerror", None) or error)
    if (full := _FULL.search(reason)) is not None:
        folder = next(parent for parent in Path(path).absolute().parents if parent.is_dir())
        size = f"{byte_size(needed)} are needed and " if needed else ""
        free = f"{size}{byte_size(shutil.disk_usage(folder).free)} are free there"
        cause = full[0] if full[0][0].isupper() else "it could not be written whole"
        reason = f"{cause}: {free}; make room, or give another place"
    return WriteError(f"cannot write {path}: {reason}")


_LOCK = ".skipdecode.lock"
_OF_MODELS = ("config.json", "adapter_config.json")
_SHOWN = 3
_NO_LOCKS = (None, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class RunDirectory:
    """The files by which the directory of a kind of run is recognised."""

    run: str  # the kind of run, in words
    # Patterns of file names, each with a key of the JSON object at the start of the file; empty: whatever it holds. One
    # such file identifies the directory of a run.
    marks: Mapping[str, str]

    def paths(self, value: str) -> tuple[Path, ...]:
        return (Path(value),)

    def check(self, directory: Path, *, overwrite: bool = False) -> None:
        """Refuse a directory that the run may not write into: the run itself compares an earlier run in it.

        Raises OutputError: it is a file, cannot be written, has a model in it, or has other files in it and `overwrite`
        is not set.
        """
        if directory.exists() and not directory.is_dir():
            raise OutputError(f"{directory} is a file: give a directory")
        check_output(directory / _LOCK)
        names = sorted(p.name for p in directory.iterdir() if p.name != _LOCK) if directory.is_dir() else []
        partial = [name for name in names if name.startswith(PARTIAL)]
        # A killed run left the directory in which it made its files, and may have moved some of them.
        killed = any((directory / name).is_dir() for name in partial)
        names = [name for name in names if name not in partial]
        if any(self._is_mark(path, key) for pattern, key in self.marks.items() for path in directory.glob(pattern)):
            return
        if model := [name for name in names if name in _OF_MODELS]:
            raise OutputError(f"{directory} holds a model ({model[0]}): give another directory")
        if names and not (overwrite or killed):
            shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
            raise OutputError(f"{directory} is not empty and holds no {self.run} ({shown}): give another directory")

    def _is_mark(self, path: Path, key: str) -> bool:
        """Whether the first line of a file, or the whole file, is a JSON object with the key."""
        if not key:
            return True
        try:
            with path.open(encoding="utf-8") as file:
                first = file.readline()
                document = json.loads(first if first.endswith("}\n") else first + file.read())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(document, dict) and key in document


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Create and lock the directory for this process; at the end, remove it if it was created and is empty.

    Raises OutputError: the directory cannot be created or written, or another process has the lock.
    """
    created = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = Lock(directory / _LOCK, directory)
        except OSError as e:
            raise OutputError(f"cannot write into {directory}: {e.strerror or e}") from None
        with contextlib.closing(lock):
            for partial in filter(Path.is_dir, directory.glob(f"{PARTIAL}*")):
                shutil.rmtree(partial)
            yield
    finally:
        for parent in created:
            with contextlib.suppress(OSError):
                parent.rmdir()


class Lock:
    """A lock of this process, in a file that is deleted at the end; messages name the path `shown`.

    Raises OutputError if another process has the lock, OSError if the file cannot be written.
    """

    def __init__(self, path: Path, shown: Path) -> None:
        self._path, self._lock = path, FileLock(path, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            free = False
        except (OSError, NotImplementedError) as e:
            # Some network file systems have no locks; two runs at once are then not detected.
            if getattr(e, "errno", None) not in _NO_LOCKS:
                raise
            return
        else:
            free = path.exists()  # if not, another run has just ended and deleted the file
        if not free:
            self._lock.release()
            raise OutputError(f"{shown} is being written by another run: wait for it, or give another output")

    def close(self) -> None:
        """Give the lock back; may be called twice."""
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # on systems where open files cannot be deleted, `release` does it
                self._path.unlink(missing_ok=True)
            self._lock.release()
