"""Records as other tools write them: the fields of a record determine its shape, its prompts and their responses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.common.jsonl import Fields, Json, Row, kind_of
from skipdecode.data.messages import REASONING, Message, as_text, has_answer, read_messages
from skipdecode.errors import DataError

_BESIDE_TEXT = ("tool_calls", *REASONING)  # of an answer, beside its text
_FIELDS_SHOWN, _CHARACTERS_SHOWN = 20, 80
_EMPTY: tuple[object, ...] = (None, "", [], {})  # a field with such a value is as good as absent
_Prompt = str | list[Message]


@dataclass(frozen=True)
class Shape:
    """A known shape of records: the fields of their prompts and responses.

    `key` is the field that tells the shape; `fields` are those of the prompt, in their order in it; `responses` those
    that may hold the response, none if it is in the prompt's field; `chat`: that field is a chat and nothing else.
    """

    name: str
    key: str
    fields: tuple[str, ...]
    responses: tuple[str, ...] = ()
    chat: bool = False

    def fits(self, row: Fields) -> bool:
        """Whether a record has a prompt and a response of this shape."""
        if row.get(self.key) is None:
            return False
        if self.chat:
            return has_answer(row[self.key])
        return not self.responses or any(row.get(name) is not None for name in self.responses)

    def prompt(self, row: Fields) -> _Prompt:
        """Read the whole prompt, as text or as a chat; raises DataError if it is empty or neither."""
        value = row[self.key]
        if self.chat or isinstance(value, list):
            messages = read_messages(self.key, value)
            if not messages:
                raise DataError(f"field {self.key!r} is empty")
            return [{name: entry for name, entry in message.items() if name != "weight"} for message in messages]
        if not isinstance(value, str):
            raise DataError(f"field {self.key!r} is {kind_of(value)}: give text, or a list of chat messages")
        if not value.strip():
            raise DataError(f"field {self.key!r} is empty")
        parts = [as_text(name, row[name]) for name in self.fields if not _is_empty(row.get(name))]
        return "\n\n".join(part for part in parts if part.strip())

    def turns(self, row: Fields) -> Iterator[tuple[_Prompt, Json]]:
        """Read each prompt with the fields of its response: `response`, and `turn` of one that is more than text."""
        if self.chat:
            yield from _answers(read_messages(self.key, row[self.key]))
        elif self.name == TEXT.name:
            yield _halves(row[self.key])
        else:
            name = found_field(row, self.responses)
            yield self.prompt(row), _response(name, row[name])

    def unused(self, row: Fields, used: Iterable[str]) -> list[str]:
        """List fields of a record with content that are not in the prompt, but for those that are `used` otherwise."""
        known = {"id", *self.fields, *used}
        return [name for name, value in row.items() if name not in known and not _is_empty(value)]

    def present_fields(self, row: Fields) -> str:
        """The fields of the prompt that a record has, in words; the one that tells the shape is the first."""
        return " and ".join(dict.fromkeys(name for name in (self.key, *self.fields) if name in row))


TEXT = Shape("text", "text", ("text",))
"""The shape of records that have nothing else: their texts are no chats."""
_SHAPES = (
    Shape("prompt and response", "prompt", ("prompt",), ("response",)),
    Shape("prompt and completion", "prompt", ("prompt",), ("completion",)),
    Shape("messages", "messages", ("messages",), chat=True),
    Shape("conversations", "conversations", ("conversations",), chat=True),
    Shape("instruction, input and output", "instruction", ("instruction", "input"), ("output",)),
    Shape("question, context and answer", "question", ("context", "question"), ("answer", "answers")),
    TEXT,
)
SHAPES = tuple(shape.name for shape in _SHAPES)
_KEYS = tuple(dict.fromkeys(shape.key for shape in _SHAPES if shape is not TEXT))
PROMPT_FIELDS = (*_KEYS, "text", "input", "mr")
"""Fields of prompts; the last three are prompts where none of the others is there."""


def shape_of_field(name: str) -> Shape:
    """The shape of records whose prompt is one field."""
    return Shape(name, name, (name,))


def fitting_shapes(row: Fields) -> list[Shape]:
    """List the shapes in which a record has prompt and response; those with an empty prompt where there is no other."""
    fitting = [shape for shape in _SHAPES if shape.fits(row)]
    fitting = [shape for shape in fitting if shape is not TEXT] or fitting  # Alpaca's `text` has prompt and response
    return [shape for shape in fitting if row[shape.key] not in _EMPTY] or fitting


def prompt_shape(row: Fields, fields: Sequence[str] = PROMPT_FIELDS) -> Shape | None:
    """The shape of a record to generate from, whose prompt is one of `fields`, None if it has none.

    A record with a response has the shape that it is learned in. Raises DataError if two prompts are there.
    """
    fitting = fitting_shapes(row)
    if len(fitting) == 1 and fitting[0] is not TEXT:
        return fitting[0]
    filled = [field for field in fields if row.get(field) not in _EMPTY]
    filled = [field for field in filled if field in _KEYS] or filled
    if len(filled) > 1:
        raise DataError(f"fits {filled[0]!r} and {filled[1]!r}: name the field of the prompt")
    key = next((field for field in (*filled, *fields) if field in row), None)
    if key is None:
        return None
    return next((shape for shape in _SHAPES if shape.key == key), shape_of_field(key))


def no_shape(row: Fields, answers: str) -> str:
    """Say, behind "its records", why a record has no shape to learn from; `answers`: what to do with prompts alone."""
    if fitting := fitting_shapes(row):
        return f"fit {fitting[0].name!r} and {fitting[1].name!r}"
    alone = next((shape for shape in _SHAPES if row.get(shape.key) not in _EMPTY), None)
    if alone is None:
        return f"have {', '.join(map(repr, row)) or 'no field'}, which is none of: {'; '.join(SHAPES)}"
    wanted = "an answer of the assistant" if alone.chat else f"a field {' or '.join(map(repr, alone.responses))}"
    return f"have prompts ({alone.key!r}) and no responses ({wanted}): {answers}"


def shaped(rows: Iterable[tuple[int, Row]], shape: Shape) -> Iterator[tuple[int, Row]]:
    """Rows with `prompt` (text or messages) and `response` (texts): of a conversation one for each answer.

    A response that is more than text has `turn`: its calls of tools, in OpenAI's form, and its reasoning.
    """
    for line, row in rows:
        if isinstance(row, DataError):
            yield line, row
            continue
        try:
            found_field(row, (shape.key,))
            turns = list(shape.turns(row))
            if not turns:
                raise DataError("no answer: no assistant's text, without a 'weight' of 0, follows another message")
        except DataError as e:
            yield line, DataError(str(e), id=row.get("id"))
            continue
        for number, (prompt, response) in enumerate(turns, 1):
            id = row.get("id") if len(turns) == 1 else f"{row.get('id') or line}.{number}"
            more = {name: row.get(name) for name in ("tools", "system")}
            yield line, more | {"prompt": prompt, **response} | ({} if id is None else {"id": id})


def found_field(row: Fields, names: Sequence[str]) -> str:
    """The first of the names that a record has; raises DataError if it has none."""
    name = next((name for name in names if name in row), None)
    if name is None:
        raise DataError(f"missing field: {' or '.join(map(repr, names))}; {field_names(row)}")
    return name


def field_names(row: Fields) -> str:
    """The names of the first fields of a record, each cut if it is long, for an error."""
    shown = [repr(name if len(name) <= _CHARACTERS_SHOWN else name[:_CHARACTERS_SHOWN] + "…") for name in row]
    more = f" and {len(shown) - _FIELDS_SHOWN} more" if len(shown) > _FIELDS_SHOWN else ""
    return f"the record has {', '.join(shown[:_FIELDS_SHOWN]) or 'no field'}{more}"


def _is_empty(value: object) -> bool:
    """Whether a value is as good as absent; tables have NaN there."""
    return value in _EMPTY or value != value


def _answers(messages: list[Message]) -> Iterator[tuple[_Prompt, Json]]:
    """Each answer that is learned, of text or calls of tools, with the messages before it."""
    learned = [message.pop("weight", 1) != 0 for message in messages]
    for number, message in enumerate(messages):
        is_answer = message["role"] == "assistant" and (message["content"] or message.get("tool_calls"))
        if number and is_answer and learned[number]:
            yield messages[:number], _response_of(message)


def _halves(text: object) -> tuple[str, Json]:
    """A text to continue: its first half, up to white space, and the rest."""
    if not isinstance(text, str):
        raise DataError(f"field 'text' is {kind_of(text)}: give text")
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    half = (start + end) // 2
    space = re.search(r"\s", text[half:end])
    cut = half + (space.start() if space else 0)
    return text[:cut], {"response": [text[cut:]]}


def _response(field: str, value: Any) -> Json:
    """The response in a field: text, several texts, SQuAD's `text` of answers, or a message."""
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):
        value = value["text"]
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, Mapping) for text in texts):
        if len(texts) > 1:
            raise DataError(f"field {field!r} has several messages: give one answer")
        (message,) = read_messages(field, [{"role": "assistant"} | texts[0]])
        return _response_of(message)
    return {"response": list(dict.fromkeys(as_text(field, text) for text in texts))}


def _response_of(message: Message) -> Json:
    turn = {name: message[name] for name in _BESIDE_TEXT if message.get(name)}
    return {"response": [message["content"]]} | ({"turn": turn} if turn else {})
