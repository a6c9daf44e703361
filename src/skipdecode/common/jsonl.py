"""JSON lines: one JSON object in UTF-8 a line. One wording for what can be wrong with a line, for all who read them.

Reading is a generator: memory does not grow with the file. Text only; knows nothing about fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skipdecode.errors import DataError

__all__ = ["BOM", "decoded", "kind_of", "object_of", "read_objects"]

BOM = b"\xef\xbb\xbf"


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """1-based line number of every line that is not blank, with its object or with what is wrong with it.

    Raises
    ------
    DataError
        If the file cannot be opened.
    """
    try:
        file = path.open("rb")
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    with file:
        for line, raw in enumerate(file, start=1):
            if line == 1:
                raw = raw.removeprefix(BOM)
            if not raw.strip():
                continue
            try:
                yield line, object_of(raw)
            except DataError as e:
                yield line, e


def object_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line; raises DataError, without the line's number, if it holds none."""
    try:
        value = json.loads(decoded(raw))
    except json.JSONDecodeError as e:
        raise DataError(f"not JSON: {e.msg} at character {e.pos + 1}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"not JSON that can be read: {type(e).__name__}") from None
    if not isinstance(value, dict):
        raise DataError(f"not a JSON object: {kind_of(value)}")
    return value


def decoded(raw: bytes) -> str:
    """The text of a line; raises DataError, without the line's number, if it is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise DataError(f"not UTF-8: byte {e.start + 1} of the line") from None


def kind_of(value: Any) -> str:
    """What a JSON value is, in words for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
