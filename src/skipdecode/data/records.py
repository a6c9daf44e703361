"""Rows of an input: id and prompt, or what is wrong with the row.

A row is a line that is not blank; rows are numbered without gaps, whatever is wrong with them, so that nothing is lost.
Reading is a generator: memory does not grow with the file. Only the check for duplicate ids keeps something per row: 8
bytes.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from skipdecode.common.jsonl import decoded, kind_of, object_of
from skipdecode.data.source import MAX_LINE_BYTES, PromptSource
from skipdecode.errors import DataError

__all__ = ["PROMPT_FIELDS", "Message", "Record", "Survey", "read_records", "survey"]

Message = dict[str, str]
PROMPT_FIELDS = ("prompt", "messages", "text", "input", "question", "mr")


@dataclass(frozen=True, slots=True)
class Record:
    """One row.

    Parameters
    ----------
    index : int
        0-based number among the rows.
    line : int
        1-based line in the file.
    id : str or int
        Field `id` where the row has one, else the line number.
    prompt : str or list of messages
        Text, or a chat as ``{"role": …, "content": …}`` objects. Empty if there is an error.
    error : str, optional
        What is wrong with the row.
    """

    index: int
    line: int
    id: str | int
    prompt: str | list[Message]
    error: str | None = None


@dataclass
class Survey:
    """What one pass over the input found.

    Parameters
    ----------
    rows : int
        All rows, bad ones included.
    bad : int
        Rows with an error.
    duplicates : int
        Rows whose id an earlier row has.
    duplicate : tuple, optional
        An id that occurs twice, with its first two lines.
    """

    rows: int = 0
    bad: int = 0
    duplicates: int = 0
    duplicate: tuple[str | int, int, int] | None = None


def read_records(
    source: PromptSource,
    prompt_field: str | None = None,
    *,
    is_done: Callable[[int], bool] = lambda index: False,
) -> Iterator[Record]:
    """Rows of `source`, in order, without those that `is_done` (of the row's index) says are done.

    `prompt_field` names the JSONL field to read; default: the first of `PROMPT_FIELDS` that a row has.
    """
    index = 0
    for line, raw in source.lines():
        if raw is not None and not raw.strip():
            continue
        if not is_done(index):
            yield _record(index, line, raw, source.format == "jsonl", prompt_field)
        index += 1


def survey(
    source: PromptSource,
    prompt_field: str | None = None,
    *,
    stop_on_error: bool = False,
    report: Callable[[Record], None] = lambda record: None,
) -> Survey:
    """Read all rows once: count them, `report` the bad ones, find duplicate ids.

    Raises
    ------
    DataError
        There is no row at all, or a bad one and `stop_on_error` is set.
    """
    found = Survey()
    hashes = array.array("q")
    for record in read_records(source, prompt_field):
        found.rows += 1
        if record.error is not None:
            if stop_on_error:
                raise DataError(f"{record.error} (in {source.name})", record.line)
            found.bad += 1
            report(record)
        if source.format == "jsonl":
            hashes.append(_id_hash(record))
    if not found.rows:
        raise DataError(f"no prompts in {source.name}: it has no line that is not blank")
    found.duplicates, example = _repeated(hashes)
    if example is not None:
        same = list(islice((r for r in read_records(source, prompt_field) if _id_hash(r) == example), 2))
        found.duplicate = same[0].id, same[0].line, same[1].line
    return found


# ---------------------------------------------------------------------- one row


def _record(index: int, line: int, raw: bytes | None, is_json: bool, prompt_field: str | None) -> Record:
    row_id: str | int = line
    try:
        if raw is None:
            raise DataError(f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB")
        if not is_json:
            return Record(index, line, line, decoded(raw))
        row = object_of(raw)
        row_id = _row_id(row, line)
        return Record(index, line, row_id, _prompt(row, prompt_field))
    except DataError as e:
        return Record(index, line, row_id, "", str(e))


def _row_id(row: dict[str, Any], line: int) -> str | int:
    row_id = row.get("id", line)
    if row_id is None:
        return line
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise DataError(f"field 'id' is {kind_of(row_id)}: give text or a whole number")
    return row_id


def _prompt(row: dict[str, Any], prompt_field: str | None) -> str | list[Message]:
    name = prompt_field or next((f for f in PROMPT_FIELDS if f in row), None)
    if name is None:
        raise DataError(f"no field {', '.join(map(repr, PROMPT_FIELDS))}: name the prompt's field with --field")
    if name not in row:
        raise DataError(f"field {name!r} is missing")
    value = row[name]
    if isinstance(value, list):
        return _messages(name, value)
    if not isinstance(value, str):
        raise DataError(f"field {name!r} is {kind_of(value)}: give text, or a list of chat messages")
    return _checked_text(f"field {name!r}", value)


def _messages(name: str, value: list[Any]) -> list[Message]:
    if not value:
        raise DataError(f"field {name!r} is empty")
    messages = []
    for number, message in enumerate(value, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"message {number} of field {name!r} is not an object with text in 'role' and 'content'")
        messages.append({"role": role, "content": _checked_text(f"message {number}", content, may_be_empty=True)})
    return messages


def _checked_text(where: str, text: str, *, may_be_empty: bool = False) -> str:
    if not may_be_empty and not text.strip():
        raise DataError(f"{where} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{where} has half of a surrogate pair, which is no text") from None
    return text


# ---------------------------------------------------------------------- duplicate ids


def _id_hash(record: Record) -> int:
    return hash((type(record.id).__name__, record.id))


def _repeated(hashes: array.array[int]) -> tuple[int, int | None]:
    """How many hashes an earlier row has, and one of them."""
    import numpy as np

    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64)) if hashes else np.empty(0, np.int64)
    again = ordered[1:][ordered[1:] == ordered[:-1]]
    return len(again), int(again[0]) if len(again) else None
