"""Directories that a run fills: which may be written, and by one run at a time.

A run may write into a directory that is absent, empty, or of an earlier run of the same kind. A model or anything else
that is there stays as it is.
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
    """What a kind of run leaves in its directory.

    Parameters
    ----------
    run : str
        The run, in words.
    marks : mapping of str to str
        Files by pattern, with a key of the JSON object at the start of each: one such file shows that the directory is
        of such a run.
    takes : str
        Pattern of the files that other options may name in the directory; the others are the run's own.
    """

    run: str
    marks: Mapping[str, str]
    takes: str = ""

    def paths(self, value: str) -> tuple[Path, ...]:
        """The directory."""
        return (Path(value),)

    def check(self, directory: Path, *, resume: bool, overwrite: bool = False) -> None:
        """Refuse, before any work, a directory that the run may not write into.

        Raises
        ------
        OutputError, UsageError
            It is a file, cannot be written, holds a model, holds other files and `overwrite` is not set, or holds an
            earlier run and neither `resume` nor `overwrite` is set.
        """
        if directory.exists() and not directory.is_dir():
            raise OutputError(f"{directory} is a file: give a directory")
        check_place(directory / _LOCK)
        names = sorted(p.name for p in directory.iterdir() if p.name != _LOCK) if directory.is_dir() else []
        if any(self._is_mark(path, key) for pattern, key in self.marks.items() for path in directory.glob(pattern)):
            if not (resume or overwrite):
                raise UsageError(
                    f"{directory} is not empty: give --resume to go on with {self.run} in it, or another directory"
                )
        elif model := [name for name in names if name in _OF_MODELS]:
            raise OutputError(f"{directory} holds a model ({model[0]}): name another directory")
        elif names and not overwrite:
            shown = ", ".join(names[:_SHOWN]) + (" …" if len(names) > _SHOWN else "")
            raise OutputError(f"{directory} is not empty and holds no {self.run} ({shown}): name another directory")

    def _is_mark(self, path: Path, key: str) -> bool:
        """Whether the first line of a file, or all of it, is a JSON object with the key."""
        try:
            with path.open(encoding="utf-8") as file:
                first = file.readline()
                found = json.loads(first if first.endswith("}\n") else first + file.read())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(found, dict) and key in found


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """The directory, made if it is not there, for this process alone; if it was made and stays empty, it goes again.

    Raises
    ------
    OutputError
        It cannot be made or written, or another process holds it.
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
    """Lock an open file until it is closed; raises OutputError, which names `path`, if another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        free = False
    except OSError:
        # Some network file systems cannot lock; there, two runs at once are not noticed.
        free = True
    else:
        free = os.fstat(handle).st_nlink > 0  # the run that had it has just ended and taken the file away
    if not free:
        raise OutputError(f"{path} is being written by another run: wait for it, or name another output")
