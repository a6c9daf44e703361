"""Records of a file, read in one way for all verbs.

A form selects the prompt of a record and its references: a `Template` for records that are learned or scored, a
`skipdecode.data.forms.PromptForm` for records to generate from. Every line that is not blank is a record. Records are
numbered without gaps, including those that cannot be used. Reading is a generator: memory does not grow with the file.
Text only; knows nothing about tokens and models.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from skipdecode.common.jsonl import Row, kind_of
from skipdecode.data.messages import Message, as_text, chat_fields, checked_text, read_messages
from skipdecode.data.shapes import Shape, found_field
from skipdecode.errors import DataError, UsageError

_REASONS_SHOWN = _LINES_SHOWN = 5


class Parts(NamedTuple):
    """Parsed fields of a record, named as in `Record`."""

    prompt: str | list[Message]
    values: Mapping[str, str] = {}
    references: tuple[str, ...] = ()
    for_chat: Mapping[str, Any] = {}
    left_out: tuple[str, ...] = ()
    asked: Mapping[str, Any] = {}
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """One record."""

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
    for_chat: Mapping[str, Any] = field(default_factory=dict)
    # Fields of the record that are not in the prompt, where the user has not chosen the prompt's field.
    left_out: tuple[str, ...] = ()
    # Settings of this record alone: `sampling` (fields of `Sampling`), `max_new_tokens`, `stop`, `json_schema`, `chat`,
    # `calling` (a `ToolChoice`).
    asked: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] = ()  # in place of a prompt
    has_id: bool = True  # whether `id` is the record's own, not the line number

    @property
    def is_blank(self) -> bool:
        """Whether a template made the prompt of blank fields only."""
        return bool(self.values) and not any(value.strip() for value in self.values.values())


class Form(Protocol):
    """Selects the prompt of a record."""

    def read(self, row: Mapping[str, Any]) -> Parts:
        """Raises DataError if the record cannot be used."""
        ...


def read_records(rows: Iterable[tuple[int, Row]], form: Form) -> Iterator[Record]:
    """The records of numbered lines, with the prompt that `form` selects, or an `error` if they cannot be used."""
    for index, (line, row) in enumerate(rows):
        own: str | int | None = None
        try:
            if isinstance(row, DataError):
                own = _id({"id": row.id})
                raise row
            own = _id(row)
            parts, error = form.read(row), None
        except DataError as e:
            parts, error = Parts(""), str(e)
        found = {**parts._asdict(), "error": error, "has_id": own is not None}
        yield Record(index, line, line if own is None else own, **found)


def _id(row: Mapping[str, Any]) -> str | int | None:
    """The record's own id, if it has one."""
    found = row.get("id", row.get("custom_id"))
    if found is None or found == "":
        return None
    if isinstance(found, bool) or not isinstance(found, str | int):
        raise DataError(f"field 'id' is {kind_of(found)}: give text or a whole number")
    return checked_text("field 'id'", found) if isinstance(found, str) else found


# ---------------------------------------------------------------------- records that cannot be used


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


# ---------------------------------------------------------------------- from the fields of a row to its prompt


class Template:
    """A prompt as text with fields of the record in it, and the field that holds the response.

    Parameters
    ----------
    prompt : str
        Text with fields in braces, as in `"{mr}\\n"`; `{{` and `}}` stand for braces.
    responses : str or sequence of str
        Fields that may hold the response, or a list of references; the first one that a record has is used. Generation
        needs none.
    chat : bool, optional
        The prompt goes through the tokenizer's chat template as one user message; None: if there is one
        (`skipdecode.data.examples.encode_source` decides).
    truncate : str, optional
        The field that is cut at its end if a prompt is longer than `max_prompt_tokens`.
    max_prompt_tokens : int, optional
        Longest prompt in tokens; goes with `truncate`.
    shape : Shape, optional
        Of the records, which `skipdecode.data.shapes.shaped` brings to the fields `prompt` and `response`. Their text
        is the value of the only field, and their chats stay chats.

    Raises UsageError if the prompt names no field or holds more than plain fields, or `truncate` is none of them.
    """

    def __init__(
        self,
        prompt: str,
        responses: str | Sequence[str] = (),
        *,
        chat: bool | None = False,
        truncate: str | None = None,
        max_prompt_tokens: int | None = None,
        shape: Shape | None = None,
    ) -> None:
        self.shape = shape
        self.prompt = prompt
        self.fields = _fields_of(prompt)
        self.responses = (responses,) if isinstance(responses, str) else tuple(responses)
        self.chat = chat
        self.truncate = truncate
        self.max_prompt_tokens = max_prompt_tokens
        if (truncate is None) != (max_prompt_tokens is None) or (truncate and truncate not in self.fields):
            raise UsageError(
                f"prompt template: {truncate!r} cannot be cut: name one of its fields and a length in tokens"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as recipes keep it."""
        names = ("responses", "chat", "truncate", "max_prompt_tokens")
        return {"template": self.prompt, **{name: getattr(self, name) for name in names}}

    def render(self, values: Mapping[str, str]) -> str:
        """The prompt with these values in the braces."""
        return self.prompt.format_map(values)

    def values(self, row: Mapping[str, Any]) -> dict[str, str]:
        """The fields of the template as text; DataError if one is missing or not text."""
        return {name: as_text(name, row[found_field(row, (name,))]) for name in self.fields}

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a record has what the template needs, and a response."""
        try:
            self.read(row)
        except DataError:
            return False
        return True

    def read(self, row: Mapping[str, Any]) -> Parts:
        """Prompt, values of its fields, responses that are not empty; DataError if a field is missing or not text."""
        name = "response" if self.shape is not None else found_field(row, self.responses)
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        references = tuple(text for text in (as_text(name, text) for text in texts) if text.strip())
        prompt, values = self._prompt(row)
        extra = {n: v for n, v in chat_fields(row, chat=not isinstance(prompt, str)).items() if n not in values}
        if self.shape is not None and (turn := row.get("turn")):
            references, extra = references or ("",), extra | {"turn": turn}
        return Parts(prompt, values, references, extra)

    def _prompt(self, row: Mapping[str, Any]) -> tuple[str | list[Message], dict[str, str]]:
        """The prompt, and the values of its fields; a chat, which has none, may be all that a prompt is."""
        name = "prompt" if self.shape is not None else self.fields[0]
        if isinstance(row.get(name), list) and (self.shape is not None or self.prompt == f"{{{name}}}"):
            return read_messages(name, row[name]), {}
        values = self.values(row) if self.shape is None else self.values_of_text(row["prompt"])
        return self.render(values), values

    def values_of_text(self, text: str) -> dict[str, str]:
        """A plain text as the value of the only field; from a rendered prompt, the value is extracted.

        DataError if the template has several fields.
        """
        if len(self.fields) > 1:
            needed = ", ".join(map(repr, self.fields))
            raise DataError(
                f"plain text cannot fill the template {self.prompt!r}: give a row with the fields {needed} (JSONL), or "
                "no template"
            )
        (name,) = self.fields
        before, _, after = self.render({name: "\0"}).partition("\0")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            text = text[len(before) : len(text) - len(after)]
        return {name: text}


def _fields_of(prompt: str) -> tuple[str, ...]:
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise UsageError(f"prompt template: {error}; write {{{{ and }}}} for braces") from None
    fields = tuple(name for _, name, _, _ in parts if name is not None)
    if not fields:
        raise UsageError("prompt template: it names no field of the record; write one in braces, as in '{text}'")
    for _, name, spec, conversion in parts:
        if name is not None and (spec or conversion or not name or name.isdecimal() or set(name) & set(".[]")):
            raise UsageError(f"prompt template: {{{name}}} is not accepted: only plain field names stand in braces")
    return tuple(dict.fromkeys(fields))
