"""What a command reads and what it writes, as its options declare it (`path` of `skipdecode.common.options.option`).

Checked in this one place, before any work: no path is both read and written, or written twice; a file that exists is
replaced with --overwrite alone; a directory is absent, empty or of an earlier run, and one run at a time writes to it.
Links count as what they name. Devices, pipes and ``-`` are written as they are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from skipdecode.cli.arguments import flag
from skipdecode.common.directories import RunDirectory, held
from skipdecode.common.files import check_place, is_stream
from skipdecode.common.options import Reads, Writes, kinds
from skipdecode.errors import OutputError, UsageError

__all__ = ["OVERWRITE", "claimed"]

OVERWRITE = "replace output files that exist; without it they are refused"
# By the launchers that accelerate knows: of several processes of one run, the first writes.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


@contextlib.contextmanager
def claimed(config: Any) -> Iterator[None]:
    """The outputs of a command that may be carried out, for this process alone.

    Raises
    ------
    UsageError, OutputError
        A path that the command may not write, by name.
    """
    written = _named(config, Writes, RunDirectory)
    read = _named(config, Reads) if written else []
    for one in written:
        if one.directory is None:
            check_place(one.value)
    for i, one in enumerate(written):
        for other in [*written[:i], *read]:
            one.check_beside(other)
    overwrite, resume = getattr(config, "overwrite", False), getattr(config, "resume", True)
    first = all(os.environ.get(name, "0") == "0" for name in _RANKS)
    with contextlib.ExitStack() as stack:
        for one in written:
            if one.directory is None:
                if Path(one.value).exists() and not is_stream(one.value) and not overwrite:
                    raise OutputError(f"{one} exists: give --overwrite to replace it, or another name")
                continue
            one.directory.check(one.paths[0], resume=resume, overwrite=overwrite)
            if first:
                stack.enter_context(held(one.paths[0]))
        yield


class _Named(NamedTuple):
    """An option's value, the paths that it stands for, and what a directory of it is to be."""

    option: str
    value: str
    paths: tuple[Path, ...]
    directory: RunDirectory | None

    def __str__(self) -> str:
        return f"{self.option} {self.value}"

    def check_beside(self, other: _Named) -> None:
        """Refuse this output where `other`, which is read or written too, is the same, in it or around it."""
        for mine in self.paths:
            for theirs in other.paths:
                if _same(mine, theirs):
                    which = "" if str(mine) == self.value or str(theirs) == other.value else f", {mine}"
                    raise UsageError(f"{self} and {other} are the same file{which}: name another output")
                if self._holds(mine, theirs) or other._holds(theirs, mine):
                    inside, around = (other, self) if _inside(theirs, mine) else (self, other)
                    raise UsageError(f"{inside} lies in {around}: name another output")

    def _holds(self, mine: Path, theirs: Path) -> bool:
        """Whether a path of another option is one that this one stands for: a file of what is read, or of a run."""
        if self.directory is not None:
            return _inside(theirs, mine) and not fnmatch(theirs.name, self.directory.takes)
        if not mine.is_dir():
            return _inside(theirs, mine)
        if not theirs.is_file():
            return False
        return _inside(theirs, mine) or any(map(theirs.samefile, filter(Path.is_file, mine.rglob("*"))))


def _named(config: Any, *uses: type[Reads | Writes | RunDirectory]) -> list[_Named]:
    """The options of the given uses (`Reads`, `Writes`, `RunDirectory`) that have a value, with their paths."""
    found = []
    for name, kind in kinds(type(config)).items():
        use = kind.metadata["path"]
        if not isinstance(use, uses):
            continue
        value, directory = getattr(config, name), use if isinstance(use, RunDirectory) else None
        named = name.upper() if kind.metadata["positional"] else flag(name)
        for one in value if kind.many else (value,):
            if one is None or (one == "-" and not directory) or (not one and not isinstance(use, Writes)):
                continue
            found.append(_Named(named, one, tuple(use.paths(one)), directory))
    return found


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are one file, through links of both kinds; character devices may be named twice."""
    if one.is_char_device():
        return False
    return os.path.realpath(one) == os.path.realpath(other) or (one.exists() and other.exists() and one.samefile(other))


def _inside(path: Path, directory: Path) -> bool:
    return Path(os.path.realpath(directory)) in Path(os.path.realpath(path)).parents
