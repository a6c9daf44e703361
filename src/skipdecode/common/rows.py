"""A user's file of records: how it is opened, and its rows as objects with the number of the line that each begins on.

Files, pipes and standard input are opened in one way (`Input`). Rows are JSON lines or CSV with a header. Reading is a
generator: memory does not grow with the file. Other kinds of files are refused by name.
"""

from __future__ import annotations

import csv
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from typing import IO, Self

from skipdecode.common.jsonl import BOM, MAX_LINE_BYTES, Row, is_text, object_of, read_lines
from skipdecode.errors import DataError, UsageError

__all__ = ["FORMATS", "Input", "check_streams", "format_of", "is_stream", "read_rows"]

FORMATS = ("jsonl", "csv", "tsv")
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_START_BYTES = 4096
_MOST_LINES = (
    5  # that a record may span which cannot be used: more are other records, behind a quote that is not closed
)
_TO_JSONL = "write it as JSON lines first, as pandas' to_json(FILE, orient='records', lines=True) does"
_NOT_READ = {
    b"PAR1": f"a Parquet file: {_TO_JSONL}",
    b"ARROW1": f"an Arrow file: {_TO_JSONL}",
    b"PK\x03\x04": "a spreadsheet or a zip archive: save it as CSV, or unpack it first",
    b"\x1f\x8b": "compressed: unpack it first (gzip -dk)",
    b"BZh": "compressed: unpack it first (bzip2 -dk)",
    b"\xfd7zXZ": "compressed: unpack it first (xz -dk)",
    b"\x28\xb5\x2f\xfd": "compressed: unpack it first (zstd -d)",
}


def format_of(name: str | Path) -> str | None:
    """One of `FORMATS` by the ending of a file's name; None if it has none of theirs."""
    return _BY_SUFFIX.get(Path(name).suffix.lower())


def is_stream(path: str | Path) -> bool:
    """Whether a path, or ``-`` for standard input, can be read only once."""
    return str(path) == "-" or (os.path.exists(path) and not os.path.isfile(path))


def check_streams(paths: Iterable[str]) -> None:
    """Refuse, with a UsageError, a stream that is named twice, or that several processes would read."""
    processes = int(os.environ.get("WORLD_SIZE", 1))  # as accelerate launch and torchrun say
    seen: set[str] = set()
    for path in filter(is_stream, paths):
        place = os.path.realpath("/dev/stdin" if path == "-" else path)
        if processes > 1:
            raise UsageError(f"{path} can be read once, and each of {processes} processes reads it: give a file")
        if place in seen:
            raise UsageError(f"{path} is named twice and can be read once: give a file")
        seen.add(place)


class Input:
    """An open file, which can be read any number of times, one time after the other.

    Parameters
    ----------
    name : str
        What messages call it.
    file : binary file
        Seekable; closed by `close`.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self._file = name, file

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """A file, or what can be read only once, a pipe or standard input (``-``): that is copied to a temporary file.

        Raises
        ------
        DataError
            It cannot be read.
        """
        name = "standard input" if str(path) == "-" else str(path)
        try:
            if not is_stream(path):
                return cls(name, Path(path).open("rb"))
            copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            with nullcontext(sys.stdin.buffer) if str(path) == "-" else Path(path).open("rb") as stream:
                shutil.copyfileobj(stream, copy)
        except OSError as e:
            raise DataError(f"cannot read the input {path}: {e.strerror or e}") from None
        return cls(name, copy)

    @cached_property
    def sha256(self) -> str:
        """The digest of all that it holds."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()  # type: ignore[arg-type]

    def start(self) -> bytes:
        """Its first bytes, up to 4096."""
        self._file.seek(0)
        return self._file.read(_START_BYTES)

    def check(self, format: str) -> None:
        """Refuse, with a DataError that says what to do, what begins as a file of a kind that is not read."""
        start = self.start()
        for magic, what in _NOT_READ.items():
            if start.startswith(magic):
                raise DataError(f"{self.name} is {what}")
        if format == "jsonl" and start.removeprefix(BOM).lstrip().startswith(b"["):
            raise DataError(f"{self.name} is a JSON array: give JSONL, one JSON object a line (jq -c '.[]' makes it)")

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """Its lines; see `read_lines`."""
        self._file.seek(0)
        return read_lines(self._file)

    def rows(self, format: str) -> Iterator[tuple[int, Row]]:
        """Its rows in one of `FORMATS`; see `read_rows`."""
        if format == "jsonl":
            return ((line, object_of(raw)) for line, raw in self.lines())
        self._file.seek(0)
        return _csv_rows(self._file, _DELIMITERS[format], self.name)

    def close(self) -> None:
        """Close it; a temporary copy is deleted."""
        self._file.close()


def read_rows(path: str | Path | Input) -> Iterator[tuple[int, Row]]:
    """1-based number of the first line of every row that is not blank, with its object or what is wrong with it.

    The format follows from the name's ending; JSON lines where that says none.

    Raises
    ------
    DataError
        If the file cannot be opened, is of a kind that is not read, or has no header that can be used.
    """
    opened = path if isinstance(path, Input) else Input.open(path)
    format = format_of(opened.name) or "jsonl"
    with closing(opened):
        opened.check(format)
        yield from opened.rows(format)


def _csv_rows(file: IO[bytes], delimiter: str, name: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    # What is no UTF-8 becomes half surrogates: the row is told, and those after it are read.
    texts = (raw.decode("utf-8", "surrogateescape") for raw in _without_mark(file))
    reader = csv.reader(texts, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as e:
            if header is None:
                raise DataError(f"{name}: no header of a {delimiter!r}-separated file: {e}", line) from None
            row: Row = DataError(f"not CSV: {e}")
        else:
            if not any(fields):
                continue
            if header is None:
                header = [field.strip() for field in fields]
                if not all(map(is_text, header)):
                    raise DataError(f"{name}: the header is not UTF-8", line)
                if "" in header or len(set(header)) < len(header):
                    raise DataError(
                        f"{name}: the header must name each column once, and names {', '.join(header)}", line
                    )
                continue
            row = _object(header, fields, delimiter)
        yield line, _checked_span(row, reader.line_num - line + 1, name, line)


def _object(header: list[str], fields: list[str], delimiter: str) -> Row:
    id = next((field for column, field in zip(header, fields, strict=False) if column == "id"), None)
    if len(fields) != len(header):
        return DataError(
            f"wrong number of fields: {len(fields)}, the header has {len(header)}",
            id=id if header[0] == "id" else None,  # elsewhere the field may be another column's
        )
    if not all(map(is_text, fields)):
        return DataError("not UTF-8", id=id)
    if delimiter == "\t" and any("\t" in field and "\n" in field for field in fields):
        return DataError("a field that begins with a quote holds tabs and line ends", id=id)
    return dict(zip(header, fields, strict=True))


def _checked_span(row: Row, lines: int, name: str, line: int) -> Row:
    """The row, which says how many lines it spans if it cannot be used; DataError where those are other records."""
    if not isinstance(row, DataError) or lines == 1:
        return row
    told = f"{row}; the record spans {lines} lines"
    if lines > _MOST_LINES:
        raise DataError(f"{told} of {name}: close the quote that opens in it, or double it where it is text", line)
    return DataError(told, id=row.id)


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    for number, raw in enumerate(lines):
        yield raw if number else raw.removeprefix(BOM)
