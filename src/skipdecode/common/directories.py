"""Output directories of runs: which directories a run may write into, one run at a time.

A run may write into a directory that does not exist, is empty, or has an earlier run of the same kind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from skipdecode.common.files import PARTIAL, check_place
from skipdecode.errors import OutputError, UsageError

_LOCK = ".skipdecode.lock"
_OF_MODELS = ("config.json", "adapter_config.json")
_SHOWN = 3
_NO_LOCKS = (None, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class RunDirectory:
    """The files by which the directory of a kind of run is recognised."""

    run: str  # the kind of run, in words
    # Patterns of file names, each with a key of the JSON object at the start of the file. One such file identifies the
    # directory of a run.
    marks: Mapping[str, str]

    def paths(self, value: str) -> tuple[Path, ...]:
        """The directory."""
        return (Path(value),)

    def check(self, directory: Path, *, resume: bool, overwrite: bool = False) -> None:
        """Refuse a directory that the run may not write into.

        Raises OutputError, UsageError: it is a file, cannot be written, has a model in it, has other files in it and
        `overwrite` is not set, or has an earlier run in it and neither `resume` nor `overwrite` is set.
        """
        if directory.exists() and not directory.is_dir():
            raise OutputError(f"{directory} is a file: give a directory")
        check_place(directory / _LOCK)
        names = sorted(p.name for p in directory.iterdir() if p.name != _LOCK) if directory.is_dir() else []
        left = [name for name in names if name.startswith(PARTIAL)]
        # A killed run left the directory in which it made its files, and may have moved some of them.
        killed = any((directory / name).is_dir() for name in left)
        names = [name for name in names if name not in left]
        if any(self._is_mark(path, key) for pattern, key in self.marks.items() for path in directory.glob(pattern)):
            if not (resume or overwrite):
                raise UsageError(
                    f"{directory} is not empty: give `resume` to continue the {self.run} in it, or another directory"
                )
        elif model := [name for name in names if name in _OF_MODELS]:
            raise OutputError(f"{directory} holds a model ({model[0]}): give another directory")
        elif names and not (overwrite or killed):
            shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
            raise OutputError(f"{directory} is not empty and holds no {self.run} ({shown}): give another directory")

    def _is_mark(self, path: Path, key: str) -> bool:
        """Whether the first line of a file, or the whole file, is a JSON object with the key."""
        try:
            with path.open(encoding="utf-8") as file:
                first = file.readline()
                found = json.loads(first if first.endswith("}\n") else first + file.read())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and key in found


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Create and lock the directory for this process; at the end, remove it if it was created and is empty.

    Raises OutputError: the directory cannot be created or written, or another process has the lock.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            lock = Lock(directory / _LOCK, directory)
        except OSError as e:
            raise OutputError(f"cannot write into {directory}: {e.strerror or e}") from None
        with closing(lock):
            for left in filter(Path.is_dir, directory.glob(f"{PARTIAL}*")):
                shutil.rmtree(left)
            yield
    finally:
        for parent in made:
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
