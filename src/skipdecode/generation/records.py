"""How output records are written, to a file or a stream.

Records of a file OUT are appended to the journal ``OUT.partial`` first, in lines of ``index ok|bad<tab>JSON``. At the
end they are written in input order to a temporary file, which is renamed to OUT. Records come almost in order (batches
are sorted by length inside a window only), so sorting them, and knowing which are finished, needs memory for a window,
not for the file. A stream (standard output, a device, a pipe) gets each record as soon as all before it are written;
such a run cannot be resumed. A terminal gets text instead of JSON.
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

WINDOW_BATCHES = 64  # of records that are read, encoded and sorted by length together
RowForm = Callable[[dict[str, Any]], bytes]


def open_writer(output: str, settings: dict[str, Any], *, form: RowForm = json_line) -> RowWriter:
    """The writer for a file name, or ``-`` for standard output.

    `settings` is the run's JSON-ready fingerprint. `form` formats a record for standard output; files hold JSON
    lines.

    Raises OutputError: it cannot be written, or holds records of an unfinished run with other settings.
    """
    if output == "-":
        return StreamWriter(sys.stdout.buffer, "standard output", form)
    if is_stream(output):
        return StreamWriter(open_stream(output), output)
    return FileWriter(Path(output), settings)


def named_text(row: dict[str, Any]) -> bytes:
    """A record for a terminal: one line of its prompt, its text, an empty line."""
    name = " ".join(row.get("prompt", f"line {row.get('line')}").split())
    width = shutil.get_terminal_size().columns - 2
    return b"> %s\n%s\n" % ((name if len(name) <= width else name[: width - 1] + "…").encode(), plain_text(row))


def plain_text(row: dict[str, Any]) -> bytes:
    """The text of a record, or its error."""
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
    """Writes finished records, in any order, to a regular file; every index from 0 on must come once.

    Attributes `rows_before` and `bad_before`: records of an earlier run, and how many of them are errors.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.rows_before = 0
        self.bad_before = 0
        self._done = _InOrder()
        self._journal = Journal(
            partial_path(path), settings, parse=_Row.parse, take=self._take,
            pieces="finished rows", remedy=f"delete {partial_path(path)} to begin anew",
        )  # fmt: skip

    @property
    def resume_hint(self) -> str:
        """How to resume an interrupted run, in one line."""
        # Counted in the file: an interrupt may come between writing a record and counting it.
        finished = sum(1 for _ in self._journal.read())
        return f"{finished} finished rows are kept in {self._journal.path}; the same command goes on from there"

    def is_done(self, index: int) -> bool:
        """Whether an earlier run wrote this record."""
        return index in self._done

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        """Write one record; raises WriteError if that fails."""
        self._journal.append(b"%d %s\t" % (index, b"bad" if bad else b"ok") + json_line(row))

    def finish(self) -> None:
        """All records are written: put the output in place, replacing an existing file. Raises WriteError."""
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
        """Close the journal and keep it; does nothing after `finish`."""
        self._journal.close()

    def _take(self, row: _Row) -> None:
        self.rows_before += 1
        self.bad_before += row.bad
        for _ in self._done.push(row.number, b""):
            pass


class StreamWriter:
    """Writes records to a stream in input order, each as soon as all before it are written; as `FileWriter`."""

    rows_before = 0
    bad_before = 0

    def __init__(self, stream: IO[bytes], name: str, form: RowForm = json_line) -> None:
        self._stream = stream
        self._name = name
        self._form = form
        self._order = _InOrder()

    @property
    def resume_hint(self) -> str:
        return f"what went to {self._name} cannot be resumed: name an output file for a run that can"

    def is_done(self, index: int) -> bool:
        return False

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        self._write(self._order.push(index, self._form(row)))

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        """Write the records that waited for an earlier one, so that an interrupted run loses none."""
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
            # The interpreter must not try again to write the rest when it closes the stream.
            with contextlib.suppress(OSError):
                self._stream.close()
            raise WriteError(f"cannot write to {self._name}: {e.strerror or e}") from None


RowWriter = FileWriter | StreamWriter


class _InOrder:
    """Yields lines in the order of their index, and holds back lines that come early."""

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
        """The lines that are held back, in order, although lines before them are missing."""
        for index in sorted(self._early):
            yield self._early.pop(index)


def partial_path(output: Path | str) -> Path:
    """The journal of finished records, beside the file that `output` names."""
    path = linked(Path(output))
    return path.with_name(path.name + ".partial")


def output_files(output: str) -> list[Path]:
    """All files that are written for an output."""
    return [Path(output), partial_path(output)]
