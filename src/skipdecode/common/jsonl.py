"""JSON lines: one JSON object in UTF-8 per line, and the messages for lines that are wrong; JSON files of results.

Reading lines is a generator: memory does not grow with the file. A result begins with its `kind` and `format`, by which
readers recognise it; in JSON lines, the first line is an object with both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from skipdecode.errors import DataError

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 * 2**20
TO_UTF8 = "convert the file, as with: iconv -f CP1252 -t UTF-8 IN > OUT"
Json = dict[str, Any]
"""A JSON object. Its values are checked where they are read."""
Fields = Mapping[str, Any]
"""A JSON object that is only read, such as the fields of a record."""
Row = Json | DataError
"""The object of a line, or the error of the line."""


def read_lines(parts: Iterator[bytes]) -> Iterator[tuple[int, bytes | None]]:
    """The bytes of all lines that are not blank, without line ends, with 1-based line numbers.

    `parts`: of `line_parts`. The bytes are None for a line longer than MAX_LINE_BYTES.
    """
    for number, raw in enumerate(parts, 1):
        if number == 1:
            raw = raw.removeprefix(BOM)
        if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
            next((rest for rest in parts if rest.endswith(b"\n")), None)  # drops the rest of the line
            yield number, None
        elif raw.strip():
            yield number, raw.rstrip(b"\r\n")


def line_parts(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file as they are; one that is longer than MAX_LINE_BYTES comes in parts of so many bytes."""
    return iter(lambda: file.readline(MAX_LINE_BYTES), b"")


def object_of(raw: bytes | None) -> Row:
    """The JSON object of a line of `read_lines`, or its error, without the line number."""
    try:
        value = json.loads(decoded(raw))
    except json.JSONDecodeError as e:
        return DataError(f"not JSON: {e.msg.removesuffix(' at')} at character {e.pos + 1}")
    except RecursionError:
        return DataError("not JSON that can be read: nested too deep")
    except ValueError:
        return DataError("not JSON that can be read: a number has too many digits")
    except DataError as e:
        return e
    return row_of(value)


def row_of(value: object) -> Row:
    """An object as a row, or the error of another value."""
    return value if isinstance(value, dict) else DataError(f"not a JSON object: {kind_of(value)}")


def decoded(raw: bytes | None) -> str:
    """The text of a line of `read_lines`; raises DataError, without the line number, if it is not text."""
    if raw is None:
        raise DataError(f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"not UTF-8: byte {e.start + 1} of the line; {TO_UTF8}") from None


def is_text(text: str) -> bool:
    """Whether a string can be encoded as UTF-8: half of a surrogate pair, from JSON or a shell, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def kind_of(value: object) -> str:
    """The kind of a JSON value, in words for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"of type {type(value).__name__}")


_BREAKS = {character.encode(): json.dumps(character)[1:-1].encode() for character in "\x85\u2028\u2029"}


def in_one_line(data: bytes) -> bytes:
    """JSON with Unicode's line ends escaped: `str.splitlines` and httpx's `iter_lines` would end a line there."""
    for raw, escaped in _BREAKS.items():
        data = data.replace(raw, escaped)
    return data


def json_line(row: object) -> bytes:
    """One line of JSON in UTF-8, with its line end; line ends in texts and half of a surrogate pair are escaped.

    A value that JSON does not have, such as a picture of a dataset, is the name of its type.
    """
    text = json.dumps(row, ensure_ascii=False, default=kind_of)
    return in_one_line(text.encode(errors="backslashreplace")) + b"\n"


KINDS = (
    "bench", "benchmark", "calibration", "evaluation", "prepared", "quality-table", "self-generated", "tuning",
)  # fmt: skip
"""All kinds; "benchmark" and "quality-table" are for scripts outside the package."""
_FORMAT = 1
PREPARED_FILE = "prepared.json"


def prepared_use(folder: str | Path) -> Json:
    """Read what a directory of `prepare` recommends: model, schedule, base, quantization; and the directory's name.

    Empty for other names.
    """
    file = Path(folder) / PREPARED_FILE
    if not file.is_file():
        return {}
    directory, use = file.absolute().parent, json.loads(file.read_bytes()).get("use", {})
    inside = {name: str(directory / value) for name, value in use.items() if value.startswith("./")}
    return {"name": directory.name, **use, **inside}


def heading(kind: str, benchmark: str | None = None) -> Json:
    """The first entries of a result of this kind; for the kind benchmark, also its name."""
    return {"kind": kind, "format": _FORMAT} | ({} if benchmark is None else {"benchmark": benchmark})


def read_result(path: Path, *kinds: str) -> Json:
    """A JSON result of one of these kinds (default: any kind); raises DataError, with the path, for other files."""
    wanted, content = kinds or KINDS, read_json(path)
    document: Json = content if isinstance(content, dict) else {}
    kind = document.get("kind")
    if kind not in wanted:
        message = "has no kind" if kind is None else f"is of kind {kind!r}"
        raise DataError(f'{path} {message}: accepted are files with "kind" {", ".join(wanted)} and "format": {_FORMAT}')
    if document.get("format") != _FORMAT:
        raise DataError(f"{path}: this version reads format {_FORMAT}, not {document.get('format')!r}")
    return document


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises DataError with the path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: not JSON: {e}") from None
