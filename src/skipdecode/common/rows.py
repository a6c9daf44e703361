"""Rows of a user's file, JSON lines or CSV with a header, as objects with the number of the line that each begins on.

Reading is a generator: memory does not grow with the file. Other kinds of files are refused by name.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from skipdecode.common.jsonl import BOM, MAX_LINE_BYTES, Row, is_text, object_of, read_lines
from skipdecode.errors import DataError

__all__ = ["FORMATS", "check_start", "format_of", "read_rows", "rows_of"]

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


def check_start(name: str, start: bytes, format: str) -> None:
    """Refuse, with a DataError that says what to do, a file that begins as one of a kind that is not read."""
    for magic, what in _NOT_READ.items():
        if start.startswith(magic):
            raise DataError(f"{name} is {what}")
    if format == "jsonl" and start.removeprefix(BOM).lstrip().startswith(b"["):
        raise DataError(f"{name} is a JSON array: give JSONL, one JSON object a line (jq -c '.[]' makes it)")


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """1-based number of the first line of every row that is not blank, with its object or what is wrong with it.

    The format follows from the file's ending; JSON lines where that says none.

    Raises
    ------
    DataError
        If the file cannot be opened, is of a kind that is not read, or has no header that can be used.
    """
    try:
        file = path.open("rb")
        start = file.peek(_START_BYTES)
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    with file:
        format = format_of(path) or "jsonl"
        check_start(str(path), start, format)
        yield from rows_of(file, format, str(path))


def rows_of(file: IO[bytes], format: str, name: str) -> Iterator[tuple[int, Row]]:
    """The rows of an open file in one of `FORMATS`; see `read_rows`."""
    if format == "jsonl":
        return ((line, object_of(raw)) for line, raw in read_lines(file))
    return _csv_rows(file, _DELIMITERS[format], name)


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
