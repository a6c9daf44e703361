"""Checks of the paths that a command reads and writes, as its options declare them (`path` of `option`).

Checked before any work: no path is both read and written, or written twice; an existing file is replaced only with
--overwrite; a directory is absent, empty or of an earlier run, and one run at a time writes into it. A link counts as
its target. Devices, pipes and ``-`` are written without these checks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from skipdecode.cli.arguments import option_name
from skipdecode.common.directories import RunDirectory, held
from skipdecode.common.files import check_place, is_stream
from skipdecode.common.options import Reads, Writes, kinds
from skipdecode.errors import OutputError, UsageError

OVERWRITE = "replace existing output files; without this option, they are an error"
# Set by the launchers that accelerate supports: only the first process of a run writes.
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


@contextlib.contextmanager
def claimed(config: Any) -> Iterator[None]:
    """Hold the outputs of a command for this process; raises UsageError or OutputError for a path it may not write."""
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
    """The value of an option, the paths that it stands for, and the kind of directory, if it is one."""

    option: str
    value: str
    paths: tuple[Path, ...]
    directory: RunDirectory | None

    def __str__(self) -> str:
        return f"{self.option} {self.value}"

    def check_beside(self, other: _Named) -> None:
        """Refuse this output if `other`, which is also read or written, is the same path, inside it or around it."""
        for mine in self.paths:
            for theirs in other.paths:
                if _same(mine, theirs):
                    which = "" if str(mine) == self.value or str(theirs) == other.value else f", {mine}"
                    raise UsageError(f"{self} and {other} are the same file{which}: name another output")
                if self._holds(mine, theirs) or other._holds(theirs, mine):
                    inside, around = (other, self) if _inside(theirs, mine) else (self, other)
                    raise UsageError(f"{inside} lies in {around}: name another output")

    def _holds(self, mine: Path, theirs: Path) -> bool:
        """Whether a path of another option belongs to this one: a file in what is read, or in a run directory."""
        if self.directory is not None:
            return _inside(theirs, mine)
        if not mine.is_dir():
            return _inside(theirs, mine)
        if not theirs.is_file():
            return False
        return _inside(theirs, mine) or any(map(theirs.samefile, filter(Path.is_file, mine.rglob("*"))))


def _named(config: Any, *uses: type[Reads | Writes | RunDirectory]) -> list[_Named]:
    """The options with a value that have one of the uses (`Reads`, `Writes`, `RunDirectory`), with their paths."""
    found = []
    for name, kind in kinds(type(config)).items():
        use = kind.metadata["path"]
        if not isinstance(use, uses):
            continue
        value, directory = getattr(config, name), use if isinstance(use, RunDirectory) else None
        for one in value if kind.many else (value,):
            if one is None or (one == "-" and not directory) or (not one and not isinstance(use, Writes)):
                continue
            found.append(_Named(option_name(type(config), name), one, tuple(use.paths(one)), directory))
    return found


def _same(one: Path, other: Path) -> bool:
    """Whether two paths are the same file, also through links; character devices may be given twice."""
    if one.is_char_device():
        return False
    return os.path.realpath(one) == os.path.realpath(other) or (one.exists() and other.exists() and one.samefile(other))


def _inside(path: Path, directory: Path) -> bool:
    return Path(os.path.realpath(directory)) in Path(os.path.realpath(path)).parents
