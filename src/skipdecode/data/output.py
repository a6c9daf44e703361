"""Where generated rows go: a file that is resumable and ends in input order, or a stream in input order.

A file OUT gets its rows in ``OUT.partial`` first (`skipdecode.data.partial`); when all are there they are put in
input order into a temporary file, which takes the name OUT in one step. Rows come almost in order (batches are sorted
by length inside a window only), so ordering them needs memory for a window, not for the file. Standard output, a device
or a pipe gets the rows as soon as those before them are there; such a run cannot be resumed.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from skipdecode.data.partial import PartialFile, json_line
from skipdecode.errors import OutputError

__all__ = ["FileWriter", "RowWriter", "StreamWriter", "check_output", "open_writer"]


class RowWriter(Protocol):
    """Takes finished rows in any order; every index from 0 on must come once.

    Attributes
    ----------
    rows_before, bad_before : int
        Rows, and error rows among them, taken over from an earlier run.
    resume_hint : str
        What the user of an interrupted run needs to know, in one line.
    """

    rows_before: int
    bad_before: int

    @property
    def resume_hint(self) -> str: ...

    def is_done(self, index: int) -> bool:
        """Whether an earlier run wrote this row."""
        ...

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        """Keep one row; raises OutputError if it cannot be written."""
        ...

    def finish(self) -> None:
        """All rows are there: put the output in place. Raises OutputError."""
        ...

    def close(self) -> None:
        """Keep what is there; nothing to do after `finish`."""
        ...


def check_output(output: str, *, overwrite: bool = False) -> None:
    """Refuse, before any heavy work, an output that could not be written at the end.

    Raises
    ------
    OutputError
        It exists and `overwrite` is not set, is a directory, or cannot be written where it is.
    """
    path = Path(output)
    if _is_stream(output):
        return
    if path.is_dir():
        raise OutputError(f"the output {output} is a directory: name a file in it")
    if path.exists() and not overwrite:
        raise OutputError(f"the output {output} exists: give --overwrite to replace it, or another name")
    partial = _partial_path(path)
    was_there = partial.exists()
    try:
        partial.open("ab").close()
        if not was_there:
            partial.unlink()
    except OSError as e:
        raise OutputError(f"cannot write {partial}: {e.strerror or e}") from None


def open_writer(output: str, settings: dict[str, Any], *, restart: bool = False) -> FileWriter | StreamWriter:
    """The writer for a file name, or ``-`` for standard output.

    `settings` is the run's JSON-ready fingerprint, `restart` drops the rows of an earlier run (`PartialFile`).
    """
    if output == "-":
        return StreamWriter(sys.stdout.buffer, "standard output")
    if _is_stream(output):
        try:
            return StreamWriter(Path(output).open("wb"), output)
        except OSError as e:
            raise OutputError(f"cannot write {output}: {e.strerror or e}") from None
    path = Path(output)
    return FileWriter(path, PartialFile(_partial_path(path), settings, restart=restart))


class FileWriter:
    """Rows for a regular file.

    Parameters
    ----------
    path : Path
        The file that `finish` puts in place, replacing one that is there.
    partial : PartialFile
        Where rows are kept until then.
    """

    def __init__(self, path: Path, partial: PartialFile) -> None:
        self.path = path
        self.partial = partial
        self.rows_before = partial.rows
        self.bad_before = partial.bad

    @property
    def resume_hint(self) -> str:
        return f"{self.partial.rows} finished rows are kept in {self.partial.path}; the same command goes on from there"

    def is_done(self, index: int) -> bool:
        return index in self.partial

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        self.partial.append(index, row, bad=bad)

    def finish(self) -> None:
        self.partial.sync()
        merging = self.path.with_name(self.path.name + ".merging")
        try:
            with merging.open("wb") as out:
                order = _InOrder()
                for index, line in self.partial.lines():
                    out.writelines(order.push(index, line))
                out.flush()
                os.fsync(out.fileno())
            merging.replace(self.path)
            self.partial.path.unlink()
        except OSError as e:
            with contextlib.suppress(OSError):
                merging.unlink(missing_ok=True)
            raise OutputError(f"cannot write {self.path}: {e.strerror or e}; {self.resume_hint}") from None
        self.partial.close()

    def close(self) -> None:
        self.partial.close()


class StreamWriter:
    """Rows for a stream, in input order, each as soon as all rows before it are there."""

    rows_before = 0
    bad_before = 0

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream = stream
        self._name = name
        self._order = _InOrder()

    @property
    def resume_hint(self) -> str:
        return f"what went to {self._name} cannot be resumed: use --output FILE for a run that can"

    def is_done(self, index: int) -> bool:
        return False

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        self._write(self._order.push(index, json_line(row)))

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        """Let rows go that waited for one before them: an interrupted run loses none."""
        if self._stream.closed:
            return
        self._write(self._order.rest())
        if self._stream is not sys.stdout.buffer:
            self._stream.close()

    def _write(self, lines: Iterator[bytes]) -> None:
        try:
            self._stream.writelines(lines)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as e:
            # What could not be written must not be tried again when the interpreter closes the stream.
            with contextlib.suppress(OSError):
                self._stream.close()
            raise OutputError(f"cannot write to {self._name}: {e.strerror or e}") from None


class _InOrder:
    """Lets lines go in the order of their index, holding back those that come early."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}

    def push(self, index: int, line: bytes) -> Iterator[bytes]:
        if index >= self._next:
            self._early.setdefault(index, line)
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1

    def rest(self) -> Iterator[bytes]:
        """What is held back, in order, although rows before it are missing."""
        for index in sorted(self._early):
            yield self._early.pop(index)


def _partial_path(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _is_stream(output: str) -> bool:
    path = Path(output)
    return output == "-" or (path.exists() and not path.is_file() and not path.is_dir())
