"""Where generated rows go: a file that is resumable and ends in input order, or a stream in input order.

A file OUT gets its rows in ``OUT.partial`` first, a journal with lines of ``index ok|bad<tab>JSON``; when all are there
they are put in input order into a temporary file, which takes the name OUT in one step. Rows come almost in order
(batches are sorted by length inside a window only), so ordering them, and knowing which are done, needs memory for a
window, not for the file. Standard output, a device or a pipe gets the rows as soon as those before them are there; such
a run cannot be resumed. On a terminal they are text, in place of JSON.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from skipdecode.common.files import is_stream, linked, open_stream, replaced
from skipdecode.common.journal import Journal
from skipdecode.common.jsonl import json_line
from skipdecode.errors import WriteError

__all__ = ["FileWriter", "RowWriter", "StreamWriter", "named_text", "open_writer", "partial_path", "plain_text"]

RowForm = Callable[[dict[str, Any]], bytes]


def open_writer(
    output: str, settings: dict[str, Any], *, restart: bool = False, form: RowForm = json_line
) -> RowWriter:
    """The writer for a file name, or ``-`` for standard output.

    `settings` is the run's JSON-ready fingerprint, `restart` drops the rows of an earlier run. `form` is how standard
    output shows a row; files hold JSON lines.

    Raises
    ------
    OutputError
        It cannot be written, or what is left there is of a run with other settings.
    """
    if output == "-":
        return StreamWriter(sys.stdout.buffer, "standard output", form)
    if is_stream(output):
        return StreamWriter(open_stream(output), output)
    return FileWriter(Path(output), settings, restart=restart)


def named_text(row: dict[str, Any]) -> bytes:
    """A row for people: one line of its prompt, its text, an empty line."""
    name = " ".join(row.get("prompt", f"line {row.get('line')}").split())
    width = shutil.get_terminal_size().columns - 2
    return b"> %s\n%s\n" % ((name if len(name) <= width else name[: width - 1] + "…").encode(), plain_text(row))


def plain_text(row: dict[str, Any]) -> bytes:
    """The text of a row, or what is wrong with it."""
    text: str = row["text"] if "text" in row else f"[{row['error']}]"
    return (text.strip("\n") + "\n").encode()


class _Row(NamedTuple):
    number: int
    bad: bool
    line: bytes

    @classmethod
    def parse(cls, raw: bytes) -> _Row:
        """A row of the journal; ValueError if it is not whole."""
        head, _, line = raw.partition(b"\t")
        index, _, kind = head.partition(b" ")
        if kind not in (b"ok", b"bad") or not (line.startswith(b"{") and line.endswith(b"}\n")):
            raise ValueError("not a whole row")
        return cls(int(index), kind == b"bad", line)


class FileWriter:
    """Takes finished rows in any order, for a regular file; every index from 0 on must come once. See `open_writer`.

    Attributes
    ----------
    rows_before, bad_before : int
        Rows, and error rows among them, taken over from an earlier run.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self.rows_before = 0
        self.bad_before = 0
        self._done = _InOrder()
        self._journal = Journal(
            partial_path(path), settings, parse=_Row.parse, take=self._take,
            pieces="finished rows", remedy="drop what is there with --restart", restart=restart,
        )  # fmt: skip

    @property
    def resume_hint(self) -> str:
        """What the user of an interrupted run needs to know, in one line."""
        # Counted in the file: an interrupt may have come between a row's way there and its count.
        finished = sum(1 for _ in self._journal.read())
        return f"{finished} finished rows are kept in {self._journal.path}; the same command goes on from there"

    def is_done(self, index: int) -> bool:
        """Whether an earlier run wrote this row."""
        return index in self._done

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        """Keep one row; raises WriteError if it cannot be written."""
        self._journal.append(b"%d %s\t" % (index, b"bad" if bad else b"ok") + json_line(row))

    def finish(self) -> None:
        """All rows are there: put the output in place, over one that is there. Raises WriteError."""
        self._journal.sync()
        try:
            with replaced(self.path) as out:
                order = _InOrder()
                for row in self._journal.read():
                    out.writelines(order.push(row.number, row.line))
            self._journal.remove()
        except OSError as e:
            raise WriteError(f"cannot write {self.path}: {e.strerror or e}; {self.resume_hint}") from None

    def close(self) -> None:
        """Keep what is there; nothing to do after `finish`."""
        self._journal.close()

    def _take(self, row: _Row) -> None:
        self.rows_before += 1
        self.bad_before += row.bad
        for _ in self._done.push(row.number, b""):
            pass


class StreamWriter:
    """A `FileWriter` for a stream: rows go out in input order, each as soon as all rows before it are there."""

    rows_before = 0
    bad_before = 0

    def __init__(self, stream: IO[bytes], name: str, form: RowForm = json_line) -> None:
        self._stream = stream
        self._name = name
        self._form = form
        self._order = _InOrder()

    @property
    def resume_hint(self) -> str:
        return f"what went to {self._name} cannot be resumed: use --output FILE for a run that can"

    def is_done(self, index: int) -> bool:
        return False

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        self._write(self._order.push(index, self._form(row)))

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
            raise WriteError(f"cannot write to {self._name}: {e.strerror or e}") from None


RowWriter = FileWriter | StreamWriter


class _InOrder:
    """Lets lines go in the order of their index, holding back those that come early."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}

    def __contains__(self, index: int) -> bool:
        return index < self._next or index in self._early

    def push(self, index: int, line: bytes) -> Iterator[bytes]:
        if index not in self:
            self._early[index] = line
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1

    def rest(self) -> Iterator[bytes]:
        """What is held back, in order, although rows before it are missing."""
        for index in sorted(self._early):
            yield self._early.pop(index)


def partial_path(output: Path | str) -> Path:
    """Where finished rows are kept until all are there: beside the file that `output` names."""
    path = linked(Path(output))
    return path.with_name(path.name + ".partial")
