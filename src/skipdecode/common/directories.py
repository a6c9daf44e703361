"""Output directories of runs: which directories a run may write into, one run at a time.

A run may write into a directory that does not exist, is empty, or has an earlier run of the same kind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from skipdecode.common.files import check_place
from skipdecode.errors import OutputError, UsageError

__all__ = ["RunDirectory", "held", "lock"]

_LOCK = ".skipdecode.lock"
_OF_MODELS = ("config.json", "adapter_config.json")
_SHOWN = 3


@dataclass(frozen=True)
class RunDirectory:
    """The files by which the directory of a kind of run is recognised.

    Parameters
    ----------
    run : str
        The kind of run, in words.
    marks : mapping of str to str
        Patterns of file names, each with a key of the JSON object at the start of the file. One such file identifies
        the directory of a run.
    takes : str
        Pattern of the files in the directory that other options may name.
    """

    run: str
    marks: Mapping[str, str]
    takes: str = ""

    def paths(self, value: str) -> tuple[Path, ...]:
        """The directory."""
        return (Path(value),)

    def check(self, directory: Path, *, resume: bool, overwrite: bool = False) -> None:
        """Refuse a directory that the run may not write into.

        Raises
        ------
        OutputError, UsageError
            It is a file, cannot be written, has a model in it, has other files in it and `overwrite` is not set, or has
            an earlier run in it and neither `resume` nor `overwrite` is set.
        """
        if directory.exists() and not directory.is_dir():
            raise OutputError(f"{directory} is a file: give a directory")
        check_place(directory / _LOCK)
        names = sorted(p.name for p in directory.iterdir() if p.name != _LOCK) if directory.is_dir() else []
        if any(self._is_mark(path, key) for pattern, key in self.marks.items() for path in directory.glob(pattern)):
            if not (resume or overwrite):
                raise UsageError(
                    f"{directory} is not empty: give --resume to continue the {self.run} in it, or another directory"
                )
        elif model := [name for name in names if name in _OF_MODELS]:
            raise OutputError(f"{directory} holds a model ({model[0]}): give another directory")
        elif names and not overwrite:
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

    Raises
    ------
    OutputError
        The directory cannot be created or written, or another process has the lock.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    path = directory / _LOCK
    try:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            file = path.open("ab")
        except OSError as e:
            raise OutputError(f"cannot write into {directory}: {e.strerror or e}") from None
        with file:
            lock(file.fileno(), directory)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()


def lock(handle: int, path: Path) -> None:
    """Lock an open file until it is closed; raises OutputError with `path` if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:
        # Some network file systems have no locks; two runs at once are then not detected.
        free = True
    else:
        free = os.fstat(handle).st_nlink > 0  # 0: another run has just ended and deleted the file
    if not free:
        raise OutputError(f"{path} is being written by another run: wait for it, or give another output")
