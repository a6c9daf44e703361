"""Records of a file, read in one way for all verbs.

A form selects the prompt of a record and its references: a `Template` for records that are learned or scored, a
`skipdecode.data.forms.PromptForm` for records to generate from. Every line that is not blank is a record. Records are
numbered without gaps, including those that cannot be used. Reading is a generator: memory does not grow with the file.
Text only; knows nothing about tokens and models.
"""

from __future__ import annotations

import json
import math
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from skipdecode.common.jsonl import Row, is_text, kind_of
from skipdecode.errors import DataError, UsageError

Message = dict[str, Any]
"""A message of a chat: ``role``, ``content``, and other fields that a chat template may use."""
_REJECTS_SHOWN, _FIELDS_SHOWN, _CHARACTERS_SHOWN = 5, 20, 80


class Parts(NamedTuple):
    """What a form selects of a record; the fields are those of `Record`."""

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
    shown = "; ".join(f"line {line}: {reason}" for line, reason in rejects[:_REJECTS_SHOWN])
    more = f"; and {len(rejects) - _REJECTS_SHOWN} more" if len(rejects) > _REJECTS_SHOWN else ""
    noun = "record" if len(rejects) == 1 else "records"
    return f"{len(rejects)} {noun} cannot be used ({counts}): {shown}{more}"


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
    shape : str, optional
        One of `skipdecode.data.shapes.SHAPES`, from which rows are brought to the fields `prompt` and `response`.

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
        shape: str | None = None,
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
        return {name: _as_text(name, row[_found(row, (name,))]) for name in self.fields}

    def read(self, row: Mapping[str, Any]) -> Parts:
        """Prompt, values of its fields, responses that are not empty; DataError if a field is missing or not text."""
        name = _found(row, self.responses)
        alone = self.prompt == f"{{{self.fields[0]}}}"
        of_chat = alone and isinstance(row.get(self.fields[0]), list)
        values = {} if of_chat else self.values(row)
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        prompt = checked_chat(self.fields[0], row[self.fields[0]]) if of_chat else self.render(values)
        # White space between two fields of a text belongs to it, unless the first ends with some.
        joined = alone and not (self.chat or isinstance(prompt, list) or prompt[-1:].isspace())
        responses = (_as_text(name, text).rstrip() for text in texts)
        found = tuple(text if joined else text.lstrip() for text in responses if text)
        extra = {field: value for field, value in for_chat(row, chat=of_chat).items() if field not in values}
        if self.shape is not None and (turn := row.get("turn")):
            found, extra = found or ("",), extra | {"turn": turn}
        return Parts(prompt, values, found, extra)

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


def _found(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of the names that the record has."""
    name = next((name for name in names if name in row), None)
    if name is None:
        shown = [repr(name if len(name) <= _CHARACTERS_SHOWN else name[:_CHARACTERS_SHOWN] + "…") for name in row]
        present = ", ".join(shown[:_FIELDS_SHOWN]) or "none"
        present += f" and {len(shown) - _FIELDS_SHOWN} more" if len(shown) > _FIELDS_SHOWN else ""
        raise DataError(f"missing field: {' or '.join(map(repr, names))}; the record has {present}")
    return name


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"field is no text: {name!r} is {kind_of(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"field is no text: {name!r} is {value}, not a finite number")
    return checked_text(f"field is no text: {name!r}", str(value))


def checked_text(where: str, text: str) -> str:
    """`text` if it can be written as UTF-8; else DataError."""
    if not is_text(text):
        raise DataError(f"{where} has half of a surrogate pair, which is no text")
    return text


def checked_chat(field: str, messages: Sequence[Any]) -> list[Message]:
    """The messages of a record, without fields that are null; DataError if one cannot be used."""
    return [_checked_message(f"message {number} of field {field!r}", m) for number, m in enumerate(messages, 1)]


def _checked_message(where: str, message: Any) -> Message:
    fields = {name: v for name, v in message.items() if v is not None} if isinstance(message, dict) else {}
    calls = _checked_objects(f"'tool_calls' of {where}", fields.pop("tool_calls", []))
    fields["content"] = content = text_of(fields.get("content", "" if calls else None))
    if not isinstance(fields.get("role"), str) or not isinstance(content, str):
        raise DataError(f"{where} is not an object with text in 'role' and 'content'")
    fields |= {"tool_calls": [_with_arguments(call) for call in calls]} if calls else {}
    return fields | {name: checked_text(where, fields[name]) for name in ("role", "content")}


def text_of(content: Any) -> Any:
    """The content of a message; of parts that are all text, in OpenAI's form, their text."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    told = [text for text in texts if isinstance(text, str)]
    return "".join(told) if parts and len(told) == len(parts) else content


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool with its arguments as an object, which chat templates take."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(found := function.get("arguments"), str):
        return call
    with suppress(ValueError, RecursionError):
        found = json.loads(found or "{}")
    if not isinstance(found, dict):
        raise DataError("'arguments' of a call are no JSON object")
    return call | {"function": {**function, "arguments": found}}


def for_chat(row: Mapping[str, Any], *, chat: bool) -> dict[str, Any]:
    """The system message and the tools of a record; `chat`: its tools have to be right. They may be JSON's text."""
    system, tools = row.get("system"), row.get("tools")
    found: dict[str, Any] = {}
    if isinstance(system, str) and system.strip():
        found["system"] = checked_text("field 'system'", system)
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools)
    if tools and (chat or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        found["tools"] = _checked_objects("field 'tools'", tools)
    return found


def _checked_objects(where: str, found: Any) -> list[Any]:
    """A list of objects; raises DataError if it is something else."""
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise DataError(f"{where} is {kind_of(found)}: give a list of objects")
    return found


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
