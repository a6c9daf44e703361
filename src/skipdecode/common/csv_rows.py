"""Records of CSV and other files with delimiters and a header."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Iterator

from skipdecode.common.jsonl import BOM, MAX_LINE_BYTES, TO_UTF8, Row, is_text
from skipdecode.errors import DataError

_MOST_LINES = 5  # of a wrong CSV record: more lines are other records, after a quote that is not closed


def find_delimiter(usual: str, start: bytes) -> str:
    """The delimiter of a CSV file by its first bytes: the usual one unless only another gives several columns."""
    lines = start.removeprefix(BOM).decode("utf-8", "replace").lstrip().splitlines()[:1]

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(lines, delimiter=delimiter, strict=True), []))
        except csv.Error:
            return 0

    return next((mark for mark in (usual, *";\t|") if columns(mark) > 1), usual)


def csv_rows(lines: Iterable[bytes], delimiter: str, name: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    rest = iter(lines)
    without_mark = itertools.chain([next(rest, b"").removeprefix(BOM)], rest)
    # Bytes that are not UTF-8 become surrogates: only the records with them have errors.
    texts = (raw.decode("utf-8", "surrogateescape") for raw in without_mark)
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
            if not fields or (header is None and (not any(fields) or fields == ["sep=", ""])):
                continue  # a blank line, or Excel's on the delimiter; where there is a header, empty cells are a record
            if header is None:
                header = _without_end([field.strip() for field in fields], 0)
                if not all(map(is_text, header)):
                    raise DataError(f"{name}: the header is not UTF-8: {TO_UTF8}", line)
                named = [*itertools.dropwhile(lambda column: not column, header)]  # pandas' index has no name
                if "" in named or len(set(named)) < len(named):
                    raise DataError(f"{name}: the header must have each column once, and has {', '.join(header)}", line)
                continue
            row = _object(header, _without_end(fields, len(header)), delimiter)
        yield line, _checked_span(row, reader.line_num - line + 1, name, line)


def _without_end(fields: list[str], least: int) -> list[str]:
    """The fields without empty ones at the end, which spreadsheets write, but at least so many."""
    filled = (number for number, field in enumerate(fields, 1) if field)
    return fields[: max(least, *filled, 0)]


def _object(header: list[str], fields: list[str], delimiter: str) -> Row:
    id = next((field for column, field in zip(header, fields, strict=False) if column == "id"), None)
    if len(fields) != len(header):
        return DataError(
            f"wrong number of fields: {len(fields)}, the header has {len(header)}",
            id=id if header[0] == "id" else None,  # in another position, the field may be that of another column
        )
    if not all(map(is_text, fields)):
        return DataError(f"not UTF-8: {TO_UTF8}", id=id)
    if delimiter == "\t" and any("\t" in field and "\n" in field for field in fields):
        return DataError("a field that begins with a quote has tabs and line ends in it", id=id)
    return {column: field for column, field in zip(header, fields, strict=True) if column}


def _checked_span(row: Row, lines: int, name: str, line: int) -> Row:
    """The record; an error gets the number of lines; raises DataError if the lines are probably other records."""
    if not isinstance(row, DataError) or lines == 1:
        return row
    message = f"{row}; the record has {lines} lines"
    if lines > _MOST_LINES:
        raise DataError(f"{message} of {name}: close its open quote, or double the quote if it is text", line)
    return DataError(message, id=row.id)
