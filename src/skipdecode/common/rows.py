"""Records from files and from Python.

Files are JSON lines, JSON arrays, tables that pandas wrote as JSON, Parquet, Arrow, or CSV with a header, also
compressed, from a file or a pipe. ``owner/name:split`` or ``owner/name:config:split`` is a dataset of a hub; the first
part may be a directory. So may be the whole name, if `datasets` saved one dataset there, or if its files are the parts
of one table. JSON lines and CSV are read line by line: memory does not grow with the file. Other kinds are refused by
name.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import hashlib
import importlib.util
import io
import itertools
import json
import lzma
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Self, cast

from skipdecode.common.files import is_stream
from skipdecode.common.jsonl import (
    BOM,
    MAX_LINE_BYTES,
    TO_UTF8,
    Json,
    Row,
    decoded,
    is_text,
    json_line,
    object_of,
    read_lines,
    row_of,
)
from skipdecode.common.plain import plain
from skipdecode.errors import DataError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset

FORMATS = ("jsonl", "csv", "tsv")
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
_PACKED = (".gz", ".zst", ".bz2", ".xz")
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_START_BYTES = 4096
_MOST_LINES = 5  # of a wrong CSV record: more lines are other records, after a quote that is not closed
_PARQUET, _ARROW, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_TABLES = (_PARQUET, _ARROW, _ARROW_STREAM)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DATASET = re.compile(r"(?P<id>[^:]+)(:(?P<config>[^:/\[]+))?:(?P<split>[^:/\[]+(\[[^\]]*\])?)")
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
Lines = Iterator[tuple[int, bytes | None]]
"""Lines of a file with their numbers; see `read_lines`."""
_NOT_READ = {
    b"FEA1": "an old Feather file: write it as Parquet or JSON lines",
    b"PK\x03\x04": "a spreadsheet or a zip archive: save it as CSV, or unpack it first",
}


def format_of(name: str | Path) -> str | None:
    """One of `FORMATS`, by the suffix of a file name; None for other suffixes."""
    path = Path(name)
    return _BY_SUFFIX.get((path.with_suffix("") if path.suffix.lower() in _PACKED else path).suffix.lower())


def check_streams(paths: Iterable[str]) -> None:
    """Refuse, with a UsageError, a stream that is given twice or read by several processes."""
    processes = int(os.environ.get("WORLD_SIZE", 1))  # set by accelerate launch and torchrun
    seen: set[str] = set()
    for path in filter(is_stream, paths):
        place = os.path.realpath("/dev/stdin" if path == "-" else path)
        if processes > 1:
            raise UsageError(f"{path} can be read only once, and {processes} processes would read it: give a file")
        if place in seen:
            raise UsageError(f"{path} is given twice and can be read only once: give a file")
        seen.add(place)


class Input:
    """An open file that can be read several times, one after the other.

    `name`: the name in messages. `file`: seekable; closed by `close`.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self._file = name, file

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file, a pipe, standard input (``-``) or a dataset; but files are copied to a temporary file.

        Raises DataError if it cannot be read, is a device, or is a stream with a line longer than MAX_LINE_BYTES.
        """
        name = "standard input" if str(path) == "-" else str(path)
        named = None if os.path.exists(name) else _DATASET.fullmatch(name)
        asked: Json = named.groupdict() if named else {"id": name}
        if os.path.isdir(name) and (parts := _parts(Path(name))):
            data = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            data.writelines(json_line(row) for part in parts for row in _whole_rows(part))
            return cls(name, data)
        if os.path.isdir(asked["id"]) or (named and _HUB_ID.fullmatch(asked["id"])):
            data = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            table = load_split(**asked).with_format("arrow")[:]
            _pyarrow(name).parquet.write_table(table, data)
            return cls(name, data)
        try:
            if not is_stream(path):
                return cls(name, _unpacked(Path(path).open("rb"), name))
            copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            with nullcontext(sys.stdin.buffer) if str(path) == "-" else Path(path).open("rb") as stream:
                _spool(stream, copy, name)
            copy.seek(0)
        except OSError as e:
            raise DataError(f"cannot read the input {path}: {e.strerror or e}") from None
        return cls(name, _unpacked(copy, name))

    @cached_property
    def sha256(self) -> str:
        """The digest of the content."""
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()  # type: ignore[arg-type]

    def start(self) -> bytes:
        """The first 4096 bytes, or fewer."""
        self._file.seek(0)
        return self._file.read(_START_BYTES)

    def begins_with(self, sign: bytes) -> bool:
        """Whether the text begins so, behind a byte order mark and blanks."""
        return self.start().removeprefix(BOM).lstrip().startswith(sign)

    def check(self) -> None:
        """Refuse, with a DataError that says what to do, other kinds of files, by their first bytes."""
        start = self.start()
        if start.startswith(_TABLES):
            return
        for magic, what in _NOT_READ.items():
            if start.startswith(magic):
                raise DataError(f"{self.name} is {what}")
        if start.startswith(_UTF16) or b"\0" in start:
            raise DataError(f"{self.name} is text in UTF-16, or no text: {TO_UTF8.replace('CP1252', 'UTF-16')}")
        if b"\r" in start.rstrip() and b"\n" not in start + self._file.read(2**20):
            raise DataError(f"{self.name} has lines that end with CR alone: convert them (tr '\\r' '\\n')")

    def is_whole(self, format: str) -> bool:
        """Whether the file is read as a whole: Parquet, Arrow, or in place of JSON lines an array or a table."""
        is_json = format == "jsonl" and (self.begins_with(b"[") or self._table is not None)
        return is_json or self.start().startswith(_TABLES)

    @cached_property
    def _table(self) -> list[Row] | None:
        """The records of one JSON object that is a table of pandas; None for other files."""
        if not self.begins_with(b"{"):
            return None
        self._file.seek(0)
        first = self._file.readline(MAX_LINE_BYTES).removeprefix(BOM)
        if first.strip() != b"{" and self._file.read(_START_BYTES).strip():  # JSON lines, not one object
            return None
        self._file.seek(0)
        try:
            return _pandas_rows(json.loads(self._file.read().removeprefix(BOM)), self.name)
        except (ValueError, TypeError, RecursionError):  # no JSON, or columns with several names
            return None

    def lines(self) -> Lines:
        """The lines; see `read_lines`. Whoever has read them all knows `sha256` too."""
        self._file.seek(0)
        digest = hashlib.sha256()
        yield from read_lines(self._file, digest.update)
        self.__dict__["sha256"] = digest.hexdigest()

    def rows(self, format: str, lines: Lines | None = None) -> Iterator[tuple[int, Row]]:
        """The records in one of `FORMATS`; see `read_rows`. JSON lines are read from `lines`, if they are given."""
        if self.is_whole(format):
            read = _table_rows if self.start().startswith(_TABLES) else _array_rows
            found = self._table if format == "jsonl" else None
            self._file.seek(0)
            return enumerate(read(self._file, self.name) if found is None else found, 1)
        if format == "jsonl":
            first = self.start().removeprefix(BOM).lstrip().partition(b"\n")[0].rstrip()
            if first.startswith(b"{") and first.endswith((b"{", b"[")):
                raise DataError(f"{self.name} is one JSON object in several lines: give an array, or JSON lines")
            return ((line, object_of(raw)) for line, raw in lines or self.lines())
        delimiter = _delimiter(_DELIMITERS[format], self.start())
        self._file.seek(0)
        return _csv_rows(self._file, delimiter, self.name)

    def close(self) -> None:
        """Close the file; a temporary copy is deleted."""
        self._file.close()


def read_rows(path: str | Path | Input) -> Iterator[tuple[int, Row]]:
    """The objects or errors of all records, with the 1-based number of the first line of each.

    The suffix of the name selects the format; default: JSON lines.

    Raises DataError: the file cannot be opened, is of another kind, or has no usable header.
    """
    opened = path if isinstance(path, Input) else Input.open(path)
    format = format_of(opened.name) or "jsonl"
    with closing(opened):
        opened.check()
        yield from opened.rows(format)


def dataset_id(source: object) -> str | None:
    """The hub id of a dataset that is named with a split; None for files and others."""
    found = None if os.path.exists(str(source)) else _DATASET.fullmatch(str(source))
    return found["id"] if found and _HUB_ID.fullmatch(found["id"]) else None


def check_source(name: str) -> None:
    """Refuse an input that is not there, or whose format needs a package that is not installed; reads nothing.

    Raises DataError, MissingExtraError.
    """
    dataset, named = dataset_id(name), _DATASET.fullmatch(name)
    of_folder = named is not None and os.path.isdir(named["id"])
    if not (dataset or of_folder or is_stream(name) or os.path.exists(name)):
        raise DataError(f"there is no file {name}")
    if dataset is not None and importlib.util.find_spec("datasets") is None:
        raise MissingExtraError(f"loading {name} from a hub (or give a file of records)", "hub")
    if name.endswith((".parquet", ".zst")) and importlib.util.find_spec("pyarrow") is None:
        raise MissingExtraError(f"reading {name}", "hub")


def _unpacked(file: IO[bytes], name: str) -> IO[bytes]:
    """The file, or a temporary copy of what is compressed in it."""
    start = file.read(_START_BYTES)
    file.seek(0)
    opener = next((opener for sign, opener in _PACKERS.items() if start.startswith(sign)), None)
    if opener is None:
        return file
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `Input.close`
    with file:
        try:
            shutil.copyfileobj(opener(file), copy)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as e:
            raise DataError(f"{name} is damaged: {e}") from None
    return copy


def _unpacked_zstd(file: IO[bytes]) -> IO[bytes]:
    return cast("IO[bytes]", _pyarrow("a .zst file").CompressedInputStream(file, "zstd"))


_PACKERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast("IO[bytes]", gzip.GzipFile(fileobj=file)),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _unpacked_zstd,
}


def _parts(folder: Path) -> list[Path]:
    """The files of a directory that are the parts of one table: their names differ in numbers alone. Else none."""
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return []
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] not in "._")
    parts = [path for path in files if format_of(path) or path.suffix in (".parquet", ".arrow", ".feather")]
    return parts if len({re.sub(r"\d+", "", path.name) for path in parts}) == 1 else []


def _whole_rows(path: Path) -> Iterator[Json]:
    for line, row in read_rows(path):
        if isinstance(row, DataError):
            raise DataError(f"{path}: {row}", line)
        yield row


def load_split(id: str, split: str | None = None, config: str | None = None, revision: str | None = None) -> Dataset:
    """A split of a dataset of a hub, or of a directory in its layout; see `datasets.load_dataset`.

    The directory of `Dataset.save_to_disk` has no splits, that of a `DatasetDict` a directory for each.
    Raises DataError: it does not load; MissingExtraError: `datasets` is not installed.
    """
    saved, alone = Path(id, split or "", "state.json").is_file(), Path(id, "state.json").is_file()
    if split is None and not saved:
        known = Path(id, "dataset_dict.json")
        splits = json.loads(known.read_bytes()).get("splits", []) if known.is_file() else ["train"]
        named = " or ".join(f"{id}:{name}" for name in splits)
        raise DataError(f"{id} is a directory: give a file, or name a split of the dataset in it ({named})")
    if split is not None and alone:
        raise DataError(f"the dataset saved in {id} has no splits: give {id}")
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"loading {id} from a hub (or give a file of records)", "hub") from None
    try:
        if saved:
            return datasets.load_from_disk(Path(id, split or ""))
        return datasets.load_dataset(id, config, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:200]
        raise DataError(f"the dataset {id} does not load ({reason}); give a file of records") from None


def _pyarrow(name: str) -> ModuleType:
    try:
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError(f"reading {name}", "hub") from None
    return pyarrow


def _table_rows(file: IO[bytes], name: str) -> Iterator[Row]:
    """The rows of a Parquet or Arrow file, without the columns in which pandas keeps an index."""
    arrow, start = _pyarrow(name), file.read(len(_ARROW))
    file.seek(0)
    try:
        if start.startswith(_PARQUET):
            opened = arrow.parquet.ParquetFile(file)
            columns, batches = opened.schema_arrow.names, opened.iter_batches(batch_size=1024)
        else:
            table = (arrow.ipc.open_file if start == _ARROW else arrow.ipc.open_stream)(file).read_all()
            columns, batches = table.column_names, table.to_batches(max_chunksize=1024)
        if len({*columns}) < len(columns):
            raise DataError(f"{name}: a column is there twice: {', '.join(columns)}")
        for batch in batches:
            for row in batch.to_pylist():
                yield {k: plain(without_nulls(value)) for k, value in row.items() if not _PANDAS_INDEX.fullmatch(k)}
    except (arrow.ArrowException, OSError) as e:
        raise DataError(f"{name} is no whole Parquet or Arrow file: {' '.join(str(e).split())[:120]}") from None


def without_nulls(value: Any) -> Any:
    """A value without the null fields of its objects: a table gives each object the fields of all others."""
    if isinstance(value, dict):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def _array_rows(file: IO[bytes], name: str) -> Iterator[Row]:
    try:
        rows = json.loads(decoded(file.read().removeprefix(BOM)))
    except (DataError, RecursionError, ValueError) as e:
        raise DataError(f"{name} is no whole JSON array: {e}") from None
    yield from map(row_of, rows)


def _pandas_rows(table: Json, name: str) -> list[Row] | None:
    """The records of a table by the `orient` with which pandas wrote it; None for another object."""
    data = table.get("data")
    if isinstance(data, list) and isinstance(columns := table.get("columns"), list):
        return [dict(zip(columns, row, strict=True)) for row in data]  # "split"
    if isinstance(schema := table.get("schema"), dict) and isinstance(data, list):
        index = schema.get("primaryKey", [])
        return [{field: value for field, value in row.items() if field not in index} for row in data]  # "table"
    inner = list(table.values())
    if not inner or not all(isinstance(each, dict) and each.keys() == inner[0].keys() for each in inner):
        return None
    counted, inner_counted = (all(map(str.isdecimal, keys)) for keys in (table, inner[0]))
    if inner_counted and not counted:
        return [{field: values[row] for field, values in table.items()} for row in inner[0]]  # "columns"
    if counted and not inner_counted:
        return inner  # "index"
    if len(inner) > 1:
        raise DataError(
            f"{name} is a table whose rows and columns cannot be told apart: write it with orient='records'"
        )
    return None


def _spool(stream: IO[bytes], copy: IO[bytes], name: str) -> None:
    """Copy a stream that has an end, as a pipe and a terminal have; DataError for what has none."""
    with contextlib.suppress(io.UnsupportedOperation):  # no open file
        kind = os.fstat(stream.fileno())
        endless = stat.S_ISCHR(kind.st_mode) and not (stream.isatty() or kind.st_rdev == os.stat(os.devnull).st_rdev)
        if endless or stat.S_ISBLK(kind.st_mode):
            raise DataError(f"{name} is a device, which is not read as records: give a file or a pipe")
    for number in itertools.count(1):
        line = stream.readline(MAX_LINE_BYTES)
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise DataError(f"{name}: longer than {MAX_LINE_BYTES // 2**20} MiB, nothing more is read", number)
        if not line:
            return
        copy.write(line)


def _delimiter(usual: str, start: bytes) -> str:
    """The delimiter of a CSV file by its first bytes: the usual one unless only another gives several columns."""
    lines = start.removeprefix(BOM).decode("utf-8", "replace").lstrip().splitlines()[:1]

    def columns(delimiter: str) -> int:
        try:
            return len(next(csv.reader(lines, delimiter=delimiter, strict=True), []))
        except csv.Error:
            return 0

    return next((each for each in (usual, *";\t|") if columns(each) > 1), usual)


def _csv_rows(lines: Iterable[bytes], delimiter: str, name: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    # Bytes that are not UTF-8 become surrogates: only the records with them have errors.
    texts = (raw.decode("utf-8", "surrogateescape") for raw in _without_mark(lines))
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
            if not fields or (header is None and not any(fields)):
                continue  # a blank line; where there is a header, empty cells are a record
            if header is None:
                header = [field.strip() for field in fields]
                if not all(map(is_text, header)):
                    raise DataError(f"{name}: the header is not UTF-8: {TO_UTF8}", line)
                named = [*itertools.dropwhile(lambda column: not column, header)]  # pandas' index has no name
                if "" in named or len(set(named)) < len(named):
                    raise DataError(f"{name}: the header must have each column once, and has {', '.join(header)}", line)
                continue
            row = _object(header, fields, delimiter)
        yield line, _checked_span(row, reader.line_num - line + 1, name, line)


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
    told = f"{row}; the record has {lines} lines"
    if lines > _MOST_LINES:
        raise DataError(f"{told} of {name}: close its open quote, or double the quote if it is text", line)
    return DataError(told, id=row.id)


def _without_mark(lines: Iterable[bytes]) -> Iterator[bytes]:
    for number, raw in enumerate(lines):
        yield raw if number else raw.removeprefix(BOM)
