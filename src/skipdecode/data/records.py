"""Records of a file, read in one way for all verbs.

A reader of rows, such as a method of `skipdecode.data.template.PromptTemplate`, makes the prompt of a record and its
references. Every line that is not blank is a record. Records are numbered without gaps, including those that cannot be
used. Reading is a generator: memory does not grow with the file. Text only; knows nothing about tokens and models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from skipdecode.common.jsonl import Fields, Row, kind_of
from skipdecode.data.chats import ToolChoice
from skipdecode.data.messages import Message, checked_text
from skipdecode.data.stopping import StopStrings
from skipdecode.errors import DataError

_REASONS_SHOWN = _LINES_SHOWN = 5


@dataclass(frozen=True)
class RecordSettings:
    """What a record asks for beside its text, as a line of OpenAI's batches does."""

    sampling: Fields  # fields of `skipdecode.engine.Sampling`
    max_new_tokens: int | None = None
    stop: StopStrings | None = None
    json_schema: Mapping[str, object] | str | None = None
    calling: ToolChoice = field(default_factory=ToolChoice)


@dataclass(frozen=True, slots=True)
class Record:
    # 0-based number of the record, and 1-based line in the file.
    index: int
    line: int
    id: str | int  # field `id` if it is there and not empty, else the line number
    prompt: str | list[Message]  # text, or a chat as ``{"role": …, "content": …}`` objects. Empty if there is an error.
    error: str | None = None  # why the record cannot be used; the kind of error ends at the first colon
    values: Mapping[str, str] = field(default_factory=dict)  # the fields that a template put into the prompt, as text
    # Texts that may follow the prompt, none empty; the first is the response that is learned.
    references: tuple[str, ...] = ()
    # The record's `system` and `tools`, and `turn` (see `shaped`), which only a chat template uses.
    for_chat: Fields = field(default_factory=dict)
    # Fields of the record that are not in the prompt, where the user has not chosen the prompt's field.
    left_out: tuple[str, ...] = ()
    settings: RecordSettings | None = None  # None: those of the command
    token_ids: tuple[int, ...] = ()  # in place of a prompt
    has_id: bool = True  # whether `id` is the record's own, not the line number
    guessed_fields: str = ""  # those of its prompt, in words, where nobody named them

    @property
    def is_blank(self) -> bool:
        """Whether a template made the prompt of blank fields only."""
        return bool(self.values) and not any(value.strip() for value in self.values.values())


ReadRow = Callable[[Record, Fields], Record]
"""Completes a numbered record from its row; raises DataError if it cannot be used."""


def read_records(rows: Iterable[tuple[int, Row]], read: ReadRow) -> Iterator[Record]:
    """The records of numbered lines, as `read` completes them, or with an `error` if they cannot be used."""
    for index, (line, row) in enumerate(rows):
        record = Record(index, line, line, "", has_id=False)
        try:
            id = _id({"id": row.id} if isinstance(row, DataError) else row)
            if id is not None:
                record = replace(record, id=id, has_id=True)
            if isinstance(row, DataError):
                raise row
            record = read(record, row)
        except DataError as e:
            record = replace(record, error=str(e))
        yield record


def _id(row: Fields) -> str | int | None:
    """The record's own id, if it has one."""
    value = row.get("id", row.get("custom_id"))
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"field 'id' is {kind_of(value)}: give text or a whole number")
    return checked_text("field 'id'", value) if isinstance(value, str) else value


class Reject(NamedTuple):
    """A record that is left out: its 1-based line and why."""

    line: int
    reason: str


def usable(records: Iterable[Record], rejects: list[Reject]) -> Iterator[Record]:
    """The records that can be used; a record with an error, or with the id of an earlier one, goes to `rejects`."""
    first_line: dict[str, int] = {}
    for record in records:
        first = first_line.setdefault(str(record.id), record.line) if record.error is None else record.line
        if record.error is not None:
            rejects.append(Reject(record.line, record.error))
        elif first != record.line:
            rejects.append(Reject(record.line, f"duplicate id: '{record.id}' is the id of line {first} too"))
        else:
            yield record


def reject_summary(rejects: Sequence[Reject]) -> str:
    """One line: the number of records that cannot be used, the reasons, and the lines of the first ones."""
    kinds = Counter(reject.reason.split(":")[0] for reject in rejects)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    noun = "record" if len(rejects) == 1 else "records"
    return f"{len(rejects)} {noun} cannot be used ({counts}): {lines_by_reason(rejects)}"


def lines_by_reason(rejects: Sequence[Reject]) -> str:
    """One line: each reason once, with the first lines that it is for, and the number of further reasons."""
    lines: dict[str, list[int]] = {}
    for line, reason in rejects:
        lines.setdefault(reason, []).append(line)
    shown = []
    for reason, numbers in list(lines.items())[:_REASONS_SHOWN]:
        first = ", ".join(map(str, numbers[:_LINES_SHOWN]))
        more = f" and {len(numbers) - _LINES_SHOWN} more" if len(numbers) > _LINES_SHOWN else ""
        shown.append(f"line{'s' if len(numbers) > 1 else ''} {first}{more}: {reason}")
    if len(lines) > _REASONS_SHOWN:
        shown.append(f"and {sum(map(len, list(lines.values())[_REASONS_SHOWN:]))} more")
    return "; ".join(shown)


def refuse_rejects(where: str, rejects: Sequence[Reject], *, skip_bad: bool) -> None:
    """Raise DataError if records cannot be used and are not to be skipped; it counts them and names the first ones."""
    if rejects and not skip_bad:
        raise DataError(f"{where}: {reject_summary(rejects)}; mend them, or give `bad_records` skip")
