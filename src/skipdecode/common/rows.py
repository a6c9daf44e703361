"""Records from files and from Python.

Files are JSON lines, JSON arrays, tables that pandas wrote as JSON, Parquet, Arrow, or CSV with a header, also
compressed, from a file or a pipe. ``owner/name:split`` or ``owner/name:config:split`` is a dataset of a hub; the first
part may be a directory. So may be the whole name, if `datasets` saved one dataset there, or if its files are the parts
of one table. JSON lines and CSV are read line by line: memory does not grow with the file. Other kinds are refused by
name.
"""

from __future__ import annotations

import bz2
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
from contextlib import closing, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Self, cast

from skipdecode.common.csv_rows import csv_rows, find_delimiter
from skipdecode.common.files import is_stream
from skipdecode.common.jsonl import (
    BOM,
    MAX_LINE_BYTES,
    TO_UTF8,
    Json,
    Row,
    json_line,
    line_parts,
    object_of,
    read_lines,
)
from skipdecode.common.table_files import TABLES, array_rows, import_pyarrow, load_split, pandas_rows, table_rows
from skipdecode.errors import DataError, MissingExtraError, UsageError

FORMATS = ("jsonl", "csv", "tsv")
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv"}
PACKED_SUFFIXES, TABLE_SUFFIXES = (".gz", ".zst", ".bz2", ".xz"), (".parquet", ".arrow", ".feather")
_DELIMITERS = {"csv": ",", "tsv": "\t"}
_START_BYTES = 4096
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_DATASET = re.compile(r"(?P<id>[^:]+)(:(?P<config>[^:/\[]+))?:(?P<split>[^:/\[]+(\[[^\]]*\])?)")
_NOT_READ = {
    b"FEA1": "an old Feather file: write it as Parquet or JSON lines",
    b"PK\x03\x04": "a spreadsheet or a zip archive: save it as CSV, or unpack it first",
}


def format_of(name: str | Path) -> str | None:
    """One of `FORMATS`, by the suffix of a file name; None for other suffixes."""
    path = Path(name)
    return _BY_SUFFIX.get((path.with_suffix("") if path.suffix.lower() in PACKED_SUFFIXES else path).suffix.lower())


def check_streams(paths: Iterable[str]) -> None:
    """Refuse, with a UsageError, a stream that is given twice or read by several processes."""
    processes = int(os.environ.get("WORLD_SIZE", 1))  # set by accelerate launch and torchrun
    seen: set[str] = set()
    for path in filter(is_stream, paths):
        target = os.path.realpath("/dev/stdin" if path == "-" else path)
        if processes > 1:
            raise UsageError(f"{path} can be read only once, and {processes} processes would read it: give a file")
        if target in seen:
            raise UsageError(f"{path} is given twice and can be read only once: give a file")
        seen.add(target)


class Input:
    """An open file that can be read several times, one after the other.

    `name`: the name in messages. `file`: seekable; closed by `close`.
    """

    def __init__(self, name: str, file: IO[bytes]) -> None:
        self.name, self._file = name, file
        file.seek(0)
        self._start = file.read(_START_BYTES)

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a file, a pipe, standard input (``-``) or a dataset; but files are copied to a temporary file.

        Raises DataError if it cannot be read, is a device, or is a stream with a line longer than MAX_LINE_BYTES.
        """
        name = "standard input" if str(path) == "-" else str(path)
        named = None if os.path.exists(name) else _DATASET.fullmatch(name)
        dataset: Json = named.groupdict() if named else {"id": name}
        if os.path.isdir(name) and (parts := _parts(Path(name))):
            data = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            data.writelines(json_line(row) for part in parts for row in _whole_rows(part))
            return cls(name, data)
        if os.path.isdir(dataset["id"]) or (named and _HUB_ID.fullmatch(dataset["id"])):
            data = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
            table = load_split(**dataset).with_format("arrow")[:]
            import_pyarrow(name).parquet.write_table(table, data)
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
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()  # type: ignore[arg-type]

    def begins_with(self, sign: bytes) -> bool:
        """Whether the text begins so, behind a byte order mark and blanks."""
        return self._start.removeprefix(BOM).lstrip().startswith(sign)

    def check(self) -> None:
        """Refuse, with a DataError that says what to do, other kinds of files, by their first bytes."""
        start = self._start
        if start.startswith(TABLES):
            return
        for magic, what in _NOT_READ.items():
            if start.startswith(magic):
                raise DataError(f"{self.name} is {what}")
        if start.startswith(_UTF16) or b"\0" in start:
            raise DataError(f"{self.name} is text in UTF-16, or no text: {TO_UTF8.replace('CP1252', 'UTF-16')}")
        self._file.seek(0)
        if b"\r" in start.rstrip() and b"\n" not in self._file.read(2**20):
            raise DataError(f"{self.name} has lines that end with CR alone: convert them (tr '\\r' '\\n')")

    def is_whole(self, format: str) -> bool:
        """Whether the file is read as a whole: Parquet, Arrow, or in place of JSON lines an array or a table."""
        is_json = format == "jsonl" and (self.begins_with(b"[") or self._table is not None)
        return is_json or self._start.startswith(TABLES)

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
            return pandas_rows(json.loads(self._file.read().removeprefix(BOM)), self.name)
        except (ValueError, TypeError, RecursionError):  # no JSON, or columns with several names
            return None

    def lines(self) -> Iterator[tuple[int, bytes | None]]:
        """The lines with their numbers; see `read_lines`. Whoever has read them all knows `sha256` too."""
        return read_lines(self._noted(line_parts(self._file)))

    def rows(self, format: str) -> Iterator[tuple[int, Row]]:
        """The records in one of `FORMATS`; see `read_rows`."""
        if self.is_whole(format):
            if self._table is not None:
                return enumerate(self._table, 1)
            self._file.seek(0)
            read = table_rows if self._start.startswith(TABLES) else array_rows
            return enumerate(read(self._file, self.name), 1)
        if format == "jsonl":
            first, end, _ = self._start.removeprefix(BOM).lstrip().partition(b"\n")
            if end and first.startswith(b"{") and first.rstrip().endswith((b"{", b"[")):
                raise DataError(f"{self.name} is one JSON object in several lines: give an array, or JSON lines")
            return ((line, object_of(raw)) for line, raw in self.lines())
        delimiter = find_delimiter(_DELIMITERS[format], self._start)
        return csv_rows(self._noted(self._file), delimiter, self.name)

    def _noted(self, parts: Iterable[bytes]) -> Iterator[bytes]:
        """The parts of the file from its start; whoever has read them all knows `sha256` too."""
        self._file.seek(0)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
            yield part
        self.__dict__["sha256"] = digest.hexdigest()

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
    match = None if os.path.exists(str(source)) else _DATASET.fullmatch(str(source))
    return match["id"] if match and _HUB_ID.fullmatch(match["id"]) else None


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


_PACKERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast("IO[bytes]", gzip.GzipFile(fileobj=file)),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda file: import_pyarrow("a .zst file").CompressedInputStream(file, "zstd"),
}


def _parts(folder: Path) -> list[Path]:
    """The files of a directory that are the parts of one table: their names differ in numbers alone. Else none."""
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return []
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] not in "._")
    parts = [path for path in files if format_of(path) or path.suffix in TABLE_SUFFIXES]
    return parts if len({re.sub(r"\d+", "", path.name) for path in parts}) == 1 else []


def _whole_rows(path: Path) -> Iterator[Json]:
    for line, row in read_rows(path):
        if isinstance(row, DataError):
            raise DataError(f"{path}: {row}", line)
        yield row


def _spool(stream: IO[bytes], copy: IO[bytes], name: str) -> None:
    """Copy a stream that has an end, as a pipe and a terminal have; DataError for what has none."""
    with suppress(io.UnsupportedOperation):  # no open file
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
