"""How output records are written, to a file or a stream.

Records of a file OUT go to the log ``OUT.partial`` first, by index. At the end they are written in input order to a
temporary file, which is renamed to OUT. A stream (standard output, a device, a pipe) gets each record as soon as all
before it are written: records come almost in order (batches are sorted by length inside a window only), so those that
wait need memory for a window. Such a run cannot be resumed. A terminal gets text instead of JSON.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

from skipdecode.common.files import is_stream, linked, open_stream, replaced
from skipdecode.common.jsonl import json_line
from skipdecode.common.resume import ResumeLog
from skipdecode.errors import WriteError

WINDOW_BATCHES = 64  # of records that are read, encoded and sorted by length together
Line = Mapping[str, object]
"""An output record, or a line of a batch's result."""
LineFormat = Callable[[Line], bytes]


def open_writer(output: str, settings: Mapping[str, object], *, form: LineFormat = json_line) -> RowWriter:
    """Open the writer for a file name, or ``-`` for standard output.

    `settings` is the run's JSON-ready fingerprint. `form` formats a record for standard output; files hold JSON
    lines.

    Raises OutputError: it cannot be written, or holds records of an unfinished run with other settings.
    """
    if output == "-":
        return StreamWriter(sys.stdout.buffer, "standard output", form)
    if is_stream(output):
        return StreamWriter(open_stream(output), output)
    return FileWriter(Path(output), settings)


def named_text(line: Line) -> bytes:
    """Format a record for a terminal: one line of its prompt, its text, an empty line."""
    name = " ".join(str(line.get("prompt", f"line {line.get('line')}")).split())
    width = shutil.get_terminal_size().columns - 2
    if len(name) > width:
        name = name[: width - 1] + "…"
    return b"> %s\n%s\n" % (name.encode(), plain_text(line))


def plain_text(line: Line) -> bytes:
    """Format the text of a record, or its error."""
    text = str(line["text"]) if "text" in line else f"[{line['error']}]"
    return (text.strip("\n") + "\n").encode()


class FileWriter:
    """Writer of finished records, in any order, to a regular file; every index from 0 on must come once.

    Attributes `rows_before` and `bad_before`: records of an earlier run, and how many of them are errors.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]) -> None:
        self.path = path
        partial = partial_path(path)
        remedy = f"delete {partial} to begin anew"
        self._log = ResumeLog(partial, settings, what="finished rows", remedy=remedy)
        self.rows_before = self._log.count
        self.bad_before = sum(bad for _, (bad, _) in self._log.items())

    @property
    def resume_hint(self) -> str:
        """How to resume an interrupted run, in one line."""
        if not self._log.count:
            return "no row is finished; the same command begins anew"  # an empty log is deleted
        return f"{self._log.count} finished rows are kept in {self._log.path}; the same command goes on from there"

    def is_done(self, index: int) -> bool:
        """Whether an earlier run wrote this record."""
        return self._log.get(index) is not None

    def put(self, index: int, line: Line, *, bad: bool = False) -> None:
        """Write one record; raises WriteError if that fails."""
        self._log.put(index, [bad, line])

    def finish(self) -> None:
        """All records are written: put the output in place, replacing an existing file. Raises WriteError."""
        try:
            with replaced(self.path) as out:
                out.writelines(json_line(line) for _, (_, line) in self._log.items())
            self._log.remove()
        except OSError as e:
            raise WriteError(f"cannot write {self.path}: {e.strerror or e}; {self.resume_hint}") from None

    def close(self) -> None:
        """Close the log and keep it; does nothing after `finish`."""
        self._log.close()


class StreamWriter:
    """Writer of records to a stream in input order, each as soon as all before it are written; as `FileWriter`."""

    rows_before = 0
    bad_before = 0

    def __init__(self, stream: IO[bytes], name: str, form: LineFormat = json_line) -> None:
        self._stream = stream
        self._name = name
        self._form = form
        self._next = 0
        self._early: dict[int, bytes] = {}

    @property
    def resume_hint(self) -> str:
        return f"what went to {self._name} cannot be resumed: name an output file for a run that can"

    def is_done(self, index: int) -> bool:
        return False

    def put(self, index: int, line: Line, *, bad: bool = False) -> None:
        self._early[index] = self._form(line)
        lines = []
        while self._next in self._early:
            lines.append(self._early.pop(self._next))
            self._next += 1
        self._write(lines)

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        """Write the records that waited for an earlier one, so that an interrupted run loses none."""
        if self._stream.closed:
            return
        self._write(self._early.pop(index) for index in sorted(self._early))
        if self._stream is not sys.stdout.buffer:
            self._stream.close()

    def _write(self, lines: Iterable[bytes]) -> None:
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


def partial_path(output: Path | str) -> Path:
    """The log of finished records, beside the file that `output` names."""
    path = linked(Path(output))
    return path.with_name(path.name + ".partial")


def output_files(output: str) -> list[Path]:
    """All files that are written for an output."""
    return [Path(output), partial_path(output)]
