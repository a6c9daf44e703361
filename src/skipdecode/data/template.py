"""How records become prompts: a template, chosen once by the options, the checkpoint and the records.

A task, a recipe and a run have one, and nothing changes it later. Knows nothing about models.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from skipdecode.common.jsonl import Fields, Json, Row, kind_of
from skipdecode.common.types import Tokenizer
from skipdecode.data.chats import chat_fault
from skipdecode.data.messages import Message, as_text, chat_fields, read_messages
from skipdecode.data.records import Record, read_records
from skipdecode.data.shapes import PROMPT_FIELDS, Shape, field_names, fitting_shapes, found_field, prompt_shape, shaped
from skipdecode.errors import DataError, UsageError

TOKEN_IDS = "prompt_token_ids"  # vLLM's field, in place of a text
Prompt = str | list[Message] | list[int] | Fields
"""A text; a chat, as a list of ``{"role": …, "content": …}``; token ids, as a list of numbers or
``{"prompt_token_ids": …}``; or a record for the checkpoint's template.

A text goes into the template that the checkpoint was tuned on, else into the chat template of the model, if it has one.
"""


@dataclass(frozen=True)
class PromptTemplate:
    """The prompt of a record as text with its fields in braces, and the fields that may hold its response.

    `text`: text with fields in braces, as in `"{mr}\\n"`; `{{` and `}}` stand for braces. Default: the prompt as it is,
    in the field that the record's shape has. `responses`: fields that may hold the response, or a list of references;
    the first one that a record has is used. Generation needs none. `chat`: plain prompts go through the tokenizer's
    chat template as one user message; None: if there is one (`for_tokenizer`). `truncate`: the field that is cut at its
    end if a prompt is longer than `max_prompt_tokens`. `max_prompt_tokens`: longest prompt in tokens, with `truncate`.
    `shape`: of the records. To learn from, `skipdecode.data.shapes.shaped` brings them to the fields `prompt` and
    `response`: their text is the value of the only field, and their chats stay chats. To generate from, it has the
    prompt's field; default: the fields of the text, else those of the record's own shape. `system`: the system message
    of every chat that has none.

    Raises UsageError if the text names no field or holds more than plain fields, or `truncate` is none of them.
    """

    text: str | None = None
    responses: tuple[str, ...] = ()
    chat: bool | None = False
    truncate: str | None = None
    max_prompt_tokens: int | None = None
    shape: Shape | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        fields, cut = self.fields, self.truncate
        if (cut is None) != (self.max_prompt_tokens is None) or (cut and cut not in fields):
            raise UsageError(f"prompt template: {cut!r} cannot be cut: name one of its fields and a length in tokens")

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields in braces, each once."""
        return () if self.text is None else _fields_of(self.text)

    def for_tokenizer(self, tokenizer: Tokenizer) -> PromptTemplate:
        """Return the template for a tokenizer: with chats if it renders chats, where nothing else was said."""
        return self if self.chat is not None else replace(self, chat=chat_fault(tokenizer) is None)

    def to_dict(self) -> Json:
        """JSON-ready, as recipes keep it."""
        names = ("responses", "chat", "truncate", "max_prompt_tokens")
        return {"template": self.text, **{name: getattr(self, name) for name in names}}

    def render(self, values: Mapping[str, str]) -> str:
        """The text with these values in the braces."""
        return str(self.text).format_map(values)

    def values(self, row: Fields) -> dict[str, str]:
        """The fields of the template as text; DataError if one is missing or not text."""
        return {name: as_text(name, row[found_field(row, (name,))]) for name in self.fields}

    def values_of_text(self, text: str) -> dict[str, str]:
        """A plain text as the value of the only field; from a rendered prompt, the value is extracted.

        DataError if the template has several fields.
        """
        if len(self.fields) > 1:
            needed = ", ".join(map(repr, self.fields))
            raise DataError(
                f"plain text cannot fill the template {self.text!r}: give a row with the fields {needed} (JSONL), or "
                "no template"
            )
        (name,) = self.fields
        before, _, after = self.render({name: "\0"}).partition("\0")
        if text.startswith(before) and text.endswith(after) and len(text) > len(before) + len(after):
            text = text[len(before) : len(text) - len(after)]
        return {name: text}

    def with_response(self, record: Record, row: Fields) -> Record:
        """The record with a row's prompt and its responses that are not empty.

        DataError if a field is missing or not text.
        """
        name = "response" if self.shape is not None else found_field(row, self.responses)
        texts = row[name] if isinstance(row[name], list) else [row[name]]
        references = tuple(text for text in (as_text(name, text) for text in texts) if text.strip())
        prompt, values = self._learned_prompt(row)
        extra = {n: v for n, v in chat_fields(row, chat=not isinstance(prompt, str)).items() if n not in values}
        if self.shape is not None and (turn := row.get("turn")):
            references, extra = references or ("",), extra | {"turn": turn}
        return replace(record, prompt=prompt, values=values, references=references, for_chat=extra)

    def examples(self, rows: Iterable[tuple[int, Row]]) -> Iterator[Record]:
        """The records of numbered rows, as `with_response` completes them."""
        rows = rows if self.shape is None else shaped(rows, self.shape)
        return read_records(rows, self.with_response)

    def fits(self, row: Fields) -> bool:
        """Whether a record has what the template needs, and a response."""
        try:
            self.with_response(Record(0, 0, 0, ""), row)
        except DataError:
            return False
        return True

    def _learned_prompt(self, row: Fields) -> tuple[str | list[Message], dict[str, str]]:
        """The prompt of a row to learn from, and the values of its fields; a chat has none."""
        name = "prompt" if self.shape is not None else self.fields[0]
        if self.shape is not None and isinstance(row["prompt"], list):
            # `shaped` has read it, and a second reading would drop nulls in the arguments of calls.
            return row["prompt"], {}
        if isinstance(row.get(name), list) and self.text == f"{{{name}}}":
            return read_messages(name, row[name]), {}
        values = self.values(row) if self.shape is None else self.values_of_text(row["prompt"])
        return self.render(values), values

    def row(self, prompt: Prompt) -> Row:
        """A text, a chat or token ids as a row of a file."""
        if isinstance(prompt, Mapping):
            return dict(prompt)
        if isinstance(prompt, str):
            field = "prompt"
        elif are_token_ids(prompt):
            field = TOKEN_IDS
        elif isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
            field = "messages"
        else:
            return DataError(f"the prompt is {kind_of(prompt)}: give text, messages, token ids or a record")
        return {field if self.shape is None else self.shape.key: prompt}

    def with_prompt(self, record: Record, row: Fields, *, keep_answer: bool = False) -> Record:
        """The record with a row's prompt: its fields in the template, or the text or chat of its shape.

        A chat loses the answer at its end, unless `keep_answer` is set. A plain text is the value of the
        template's only field. Raises DataError if the prompt is missing, empty or not text.
        """
        if self.shape is None and (ids := row.get(TOKEN_IDS)):
            if not are_token_ids(ids):
                raise DataError(f"field {TOKEN_IDS!r} is not a list of token ids, which are whole numbers")
            return replace(record, token_ids=tuple(ids))
        if self._fills(row):
            values = self.values(row)
            if not any(value.strip() for value in values.values()):
                raise DataError(f"field {self.fields[0]!r} is empty")
            extra = {name: value for name, value in chat_fields(row, chat=False).items() if name not in values}
            return replace(record, prompt=self.render(values), values=values, for_chat=extra)
        shape = self._shape_of(row)
        prompt, values = shape.prompt(row), {}
        extra = chat_fields(row, chat=not isinstance(prompt, str))
        left_out = () if self.shape is not None else tuple(map(repr, shape.unused(row, extra)))
        if not keep_answer and not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            prompt, left_out = prompt[:-1], (*left_out, f"the answer at the end of {shape.key!r}")
            if not prompt:
                raise DataError(f"field {shape.key!r} has an answer, and no message before it")
        if isinstance(prompt, str) and self.text is not None:
            values = self.values_of_text(prompt)
            prompt = self.render(values)
        guessed = shape.present_fields(row) if self.shape is None and self.text is None else ""
        return replace(record, prompt=prompt, values=values, for_chat=extra, left_out=left_out, guessed_fields=guessed)

    def record_of(self, prompt: Prompt) -> Record:
        """A single record to generate from; it has an `error` if it cannot be used."""
        return next(read_records([(1, self.row(prompt))], self.with_prompt))

    def _fills(self, row: Fields) -> bool:
        """Whether the template renders a row: the row has fields of it that are not chats.

        A template that is the prompt alone adds nothing to it, so a shape says what the prompt is.
        """
        if self.shape is not None or (self.text == "{prompt}" and len(fitting_shapes(row)) == 1):
            return False
        return any(field in row and not isinstance(row[field], list) for field in self.fields)

    def _shape_of(self, row: Fields) -> Shape:
        """The shape of a row's prompt."""
        if self.shape is not None:
            if self.shape.key not in row:
                raise DataError(f"field {self.shape.key!r} is missing ({field_names(row)})")
            return self.shape
        # `mr` belongs to records of another template.
        shape = prompt_shape(row, (*PROMPT_FIELDS[:-1], *self.fields) if self.fields else PROMPT_FIELDS)
        if shape is None:
            self.values(row)  # raises for the missing field
            wanted = ", ".join(map(repr, PROMPT_FIELDS))
            raise DataError(f"no field {wanted}: name the field of the prompt ({field_names(row)})")
        return shape


def are_token_ids(value: object) -> bool:
    """Whether a value is a list of whole numbers, and not empty."""
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _fields_of(text: str) -> tuple[str, ...]:
    try:
        parts = list(string.Formatter().parse(text))
    except ValueError as error:
        raise UsageError(f"prompt template: {error}; write {{{{ and }}}} for braces") from None
    fields = tuple(name for _, name, _, _ in parts if name is not None)
    if not fields:
        raise UsageError("prompt template: it names no field of the record; write one in braces, as in '{text}'")
    for _, name, spec, conversion in parts:
        if name is not None and (spec or conversion or not name or name.isdecimal() or set(name) & set(".[]")):
            raise UsageError(f"prompt template: {{{name}}} is not accepted: only plain field names stand in braces")
    return tuple(dict.fromkeys(fields))
