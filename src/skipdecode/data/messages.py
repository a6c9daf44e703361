"""Texts and messages of records and requests: one reader for files, tuning, Python and the server.

It takes messages as OpenAI, ShareGPT, Bedrock and tables write them, and returns what chat templates take: text in
`role` and `content`, calls of tools in OpenAI's form with their arguments as objects, and further fields as they are.
Knows nothing about tokenizers: `skipdecode.data.chats.render_chat` adapts roles and reasoning to a template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from skipdecode.common.jsonl import Fields, Json, is_text, kind_of
from skipdecode.common.plain import without_nulls
from skipdecode.errors import DataError

Message = Json
"""A message of a chat: ``role``, ``content``, and other fields that a chat template may use."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning before an answer, in its message."""
MESSAGE_FIELDS = {
    "role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "annotations", "audio",
    "type", "weight", "train", *REASONING,
}  # fmt: skip
"""Fields of a message of OpenAI, which distinguish messages from records."""
_CALL = "function_call"
_ASSISTANT = {"assistant", "gpt", "chatgpt", "bot", "model", _CALL}
_ROLES = {"human": "user", "observation": "tool", "function": "tool"} | dict.fromkeys(_ASSISTANT, "assistant")
_SENDERS = {*_ROLES, "user", "system", "developer", "tool"}
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_TEXTS = (*REASONING, "name", "tool_call_id")
_TYPES = ("text", "message")  # of a message, which say nothing more than its role
_EMPTY: tuple[object, ...] = (None, [], {})
_MAY_BE_NULL = ("default", "const")  # entries of a JSON schema


def checked_text(where: str, text: str) -> str:
    """Return `text` if it can be written as UTF-8; else raise DataError."""
    if not is_text(text):
        raise DataError(f"{where} has half of a surrogate pair, which is no text")
    return text


def as_text(field: str, value: object) -> str:
    """Return the text of a field, which may be a number; raises DataError for another value."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"field is no text: {field!r} is {kind_of(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"field is no text: {field!r} is {value}, not a finite number")
    return checked_text(f"field is no text: {field!r}", str(value))


def read_messages(field: str, value: object) -> list[Message]:
    """Read the messages in a field: a list, or its JSON text. A system message without content is left out.

    An answer that is not learned (`weight` 0, `train` false) has the entry `weight` 0.

    Raises DataError, which names the message, if one cannot be used.
    """
    messages = _parsed(value)
    if not isinstance(messages, list):
        raise DataError(f"field {field!r} is {kind_of(value)}: give a list of messages")
    read = (_message(f"message {number} of field {field!r}", message) for number, message in enumerate(messages, 1))
    return [message for message in read if message["content"] is not None]


def is_message(value: object) -> bool:
    """Whether a value is a message of a chat, and not a record."""
    if not isinstance(value, Mapping):
        return False
    return {"from", "value"} <= value.keys() or {"role"} < value.keys() <= MESSAGE_FIELDS


def has_answer(value: object) -> bool:
    """Whether one of the messages in a field is an assistant's; a field that cannot be read counts as one that has."""
    messages = _parsed(value)
    if not isinstance(messages, list):
        return True
    roles = [_known(message.get("role", message.get("from"))) for message in messages if isinstance(message, Mapping)]
    return any(role in _ASSISTANT for role in roles)


def _message(where: str, value: object) -> Message:
    fields = without_nulls(dict(value)) if isinstance(value, Mapping) else {}
    role = _role(fields)
    content = fields.pop("content", None)
    if role == _CALL:
        if not isinstance(_parsed(content), list | dict):
            raise DataError(f"{where} is a call and no JSON: give an object with name and arguments")
        fields["tool_calls"], content = content, None
    for name in _TEXTS:
        if fields.get(name) not in _EMPTY and not isinstance(fields[name], str):
            raise DataError(f"{name!r} of {where} is {kind_of(fields[name])}: give text")
    calls = _calls(where, fields)
    if fields.get("type") in _TYPES:
        del fields["type"]
    learned = fields.pop("weight", 1) != 0 and fields.pop("train", True) is not False
    role, text = _ROLES.get(role or "", role), _text(where, content)
    if text is None and isinstance(fields.get("refusal"), str):
        text = fields.pop("refusal")
    if text is None and (calls or any(fields.get(name) for name in REASONING)):
        text = ""
    if role is None or (text is None and role not in ("system", "developer")):
        raise DataError(f"{where} is not an object with text in 'role' and 'content'")
    if calls and role != "assistant":
        raise DataError(f"{where} has 'tool_calls', which belong to an assistant's message, not to the role {role!r}")
    message = {"role": checked_text(where, role), "content": text} | ({"tool_calls": calls} if calls else {})
    message |= {name: entry for name, entry in fields.items() if entry not in _EMPTY}
    return message if learned or role != "assistant" else message | {"weight": 0}


def _role(fields: Json) -> str | None:
    """Take the role out of the fields of a message; `from` and `value` become role and content."""
    role, sender = fields.pop("role", None), fields.pop("from", None)
    if sender is not None:
        role, fields["content"] = sender, fields.pop("value", None)
    known = _known(role)
    if sender is not None and known not in _SENDERS:
        raise DataError(f"'from' is {sender!r}: give one of {', '.join(sorted(_SENDERS))}")
    return known or None


def _known(role: Any) -> str | None:
    """A role; a known one in small letters. None if it is no text."""
    lower = role.strip().lower() if isinstance(role, str) else None
    return lower if lower in _SENDERS or not lower else role


def _text(where: str, content: object) -> str | None:
    """Return the text of a content, which is text or a list of parts; None without content."""
    if content is None or content == []:
        return None
    if not isinstance(content, list):
        content = [content]
    texts = [part if isinstance(part, str) else _text_of_part(where, part) for part in content]
    return checked_text(where, "".join(texts))


def _text_of_part(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise DataError(f"{where} has {kind_of(part)} in place of text or of parts of the type 'text'")
    kind = part.get("type", "text")
    text = part.get(_PARTS[kind]) if isinstance(kind, str) and kind in _PARTS else None
    if not isinstance(text, str):
        raise DataError(f"{where} has a part of the type {kind!r} without text: give parts of the type 'text'")
    return text


def _calls(where: str, fields: Json) -> list[Message]:
    """Take the calls of tools, also in OpenAI's older form, out of the fields of a message."""
    calls, older = _parsed(fields.pop("tool_calls", [])), fields.pop(_CALL, None)
    if isinstance(calls, Mapping) or older is not None:
        calls = [older or calls]
    return [_call(where, call) for call in _objects(f"'tool_calls' of {where}", calls)]


def _call(where: str, call: Fields) -> Message:
    """A call of a tool in OpenAI's form, with its arguments as an object; datasets have name and arguments alone."""
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"a call of {where} has no name: give an object with 'name' and 'arguments'")
    arguments = _parsed(function.get("arguments") or {})
    if not isinstance(arguments, dict):
        raise DataError(f"'arguments' of a call of {where} are no JSON object")
    rest = {name: call[name] for name in ("id", "type") if name in call}
    return {"type": "function", **rest, "function": {"name": function["name"], "arguments": arguments}}


def chat_fields(row: Fields, *, chat: bool) -> Json:
    """Return the system message and the tools of a record; `chat`: both have to be right.

    Tools may be JSON's text, as tables have them, together or one by one.
    """
    system, tools = row.get("system"), _parsed(row.get("tools"))
    fields: Json = {}
    if (chat or isinstance(system, str)) and (text := _text("field 'system'", system)) and text.strip():
        fields["system"] = text
    if isinstance(tools, list):
        tools = [_parsed(tool) for tool in tools]
    if tools and (chat or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        fields["tools"] = without_nulls(_objects("field 'tools'", tools), _MAY_BE_NULL)
    return fields


def _objects(where: str, value: object) -> list[Json]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(f"{where} is {kind_of(value)}: give a list of objects")
    return value


def _parsed(value: object) -> object:
    """Return the value of JSON's text of an object or a list; another value as it is."""
    parsed = value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(value)
    return parsed if isinstance(parsed, list | dict) else value
