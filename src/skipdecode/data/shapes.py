"""Records as other tools write them: the shape is told by the fields, and each becomes prompts with their responses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from skipdecode.common.jsonl import Row, kind_of
from skipdecode.data.records import checked_chat, text_of
from skipdecode.errors import DataError

_CALL = "function_call"
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLES |= {role: role for role in ("user", "assistant", "system", "tool")} | {"observation": "tool"}
_ROLES |= {_CALL: "assistant"}
_MORE = ("tool_calls", "reasoning_content", "thinking")  # of an answer, beside its text
TEXT = "text"
"""The shape of records that have nothing else: their texts are no chats."""
Turn = tuple[Any, Any]  # a prompt, as text or messages, and its response, as text or a message


def _completion(row: Mapping[str, Any]) -> Iterator[Turn]:
    prompt, given = row["prompt"], row["completion"]
    if isinstance(given, list):  # messages, as the prompt then is
        if len(given) != 1 or not isinstance(given[0], dict):
            raise DataError("field 'completion' has several messages: give one answer")
        given = given[0]
    yield prompt, given


def _messages(row: Mapping[str, Any]) -> Iterator[Turn]:
    """Each answer, of text or calls of tools, with the messages before it, where OpenAI's `weight` is not 0."""
    messages = messages_of(row)
    learned = [isinstance(one, dict) and one.get("role") == "assistant" and one.pop("weight", 1) for one in messages]
    for number, message in enumerate(messages):
        if number and learned[number] and (message.get("content") or message.get("tool_calls")):
            yield messages[:number], message


def _halves(row: Mapping[str, Any]) -> Iterator[Turn]:
    """A text to continue: its first half, up to white space, and the rest."""
    if not isinstance(text := row["text"], str):
        raise DataError(f"field 'text' is {kind_of(text)}: give text")
    half = len(text := text.strip()) // 2
    space = re.search(r"\s", text[half:])
    cut = half + (space.start() if space else 0)
    yield text[:cut], text[cut:]


# Fields that a record must have, others that belong to it, and its prompts with responses.
_SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Mapping[str, Any]], Iterable[Turn]]]] = {
    "prompt and response": (("prompt", "response"), (), lambda row: [(row["prompt"], row["response"])]),
    "prompt and completion": (("prompt", "completion"), (), _completion),
    "messages": (("messages",), (), _messages),
    "conversations": (("conversations",), (), _messages),
    "instruction, input and output": (
        ("instruction", "output"),
        ("input",),
        lambda row: [(joined(row["instruction"], row.get("input")), row["output"])],
    ),
    "question, context and answer": (
        ("question", "answer"),
        ("context",),
        lambda row: [(joined(row.get("context"), row["question"]), row["answer"])],
    ),
    TEXT: (("text",), (), _halves),
}
SHAPES = tuple(_SHAPES)


def joined(first: Any, second: Any) -> Any:
    """Two parts of a prompt with an empty line between them; a part that is empty or absent is left out."""
    if isinstance(first, str) and isinstance(second, str) and first.strip() and second.strip():
        return f"{first}\n\n{second}"
    return second if first is None or first == "" else first


def messages_of(row: Mapping[str, Any]) -> list[Any]:
    """The messages of a chat under the names of OpenAI or of ShareGPT."""
    name = "messages" if "messages" in row else "conversations"
    found = row[name]
    if not isinstance(found, list):
        raise DataError(f"field {name!r} is {kind_of(found)}: give a list of messages")
    turns = [dict(turn) if isinstance(turn, Mapping) else turn for turn in found]
    for turn in turns:
        if isinstance(turn, dict) and "from" in turn:
            if (role := turn.pop("from")) not in _ROLES:
                raise DataError(f"'from' is {role!r}: give one of {', '.join(_ROLES)}")
            turn |= {"role": _ROLES[role], "content": turn.pop("value", None)}
            if role == _CALL:  # JSON's text of one call or several
                turn["tool_calls"] = _calls(turn.pop("content"))
    return turns


def _calls(text: Any) -> list[Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise DataError(f"'value' of a {_CALL!r} is no JSON: give an object with name and arguments") from None
    return [{"type": "function", "function": call} for call in (found if isinstance(found, list) else [found])]


def shape_of(row: Mapping[str, Any], where: str) -> str:
    """The shape of a record to learn from; raises DataError if none or two fit."""
    fitting = [name for name, (needed, _, _) in _SHAPES.items() if all(field in row for field in needed)]
    if len(fitting) == 1 or fitting[1:] == [TEXT]:  # Alpaca's `text` has prompt and response
        return fitting[0]
    has = ", ".join(map(repr, row)) or "no field"
    what = (
        f"fit {' and '.join(map(repr, fitting))}" if fitting else f"have {has}, which is none of: {'; '.join(SHAPES)}"
    )
    raise DataError(
        f"{where}: its records {what}; give a `task`, or `prompt_field` (or `prompt_template`) with `response_field`"
    )


def left_out(row: Mapping[str, Any], shape: str) -> list[str]:
    """Fields of a record that are neither prompt nor response."""
    needed, more, _ = _SHAPES[shape]
    used = {*needed, *more, "id", "system", "tools"}  # where these two are not in a prompt, its encoder says so
    return [name for name, value in row.items() if name not in used and value not in (None, "", [])]


def shaped(rows: Iterable[tuple[int, Row]], shape: str) -> Iterator[tuple[int, Row]]:
    """Rows with `prompt` (text or messages) and `response`: of a conversation one for each answer.

    A response that is more than text has `turn`: its calls of tools, in OpenAI's form, and its reasoning.
    """
    read = _SHAPES[shape][2]
    for line, row in rows:
        if isinstance(row, DataError):
            yield line, row
            continue
        try:
            turns = [(prompt, _response(given)) for prompt, given in read(row)]
            if not turns:
                raise DataError("no answer: no assistant's text, without a 'weight' of 0, follows another message")
        except KeyError as e:
            yield line, DataError(f"missing field: {e}", id=row.get("id"))
        except DataError as e:
            yield line, DataError(str(e), id=row.get("id"))
        else:
            for number, (prompt, response) in enumerate(turns, 1):
                id = row.get("id") if len(turns) == 1 else f"{row.get('id') or line}.{number}"
                more = {name: row.get(name) for name in ("tools", "system")}
                yield line, more | {"prompt": prompt, **response} | ({} if id is None else {"id": id})


def _response(given: Any) -> dict[str, Any]:
    """The fields of a response, which is text or a message."""
    if not isinstance(given, dict):
        return {"response": given}
    if not any(given.get(name) for name in _MORE):
        return {"response": text_of(given.get("content"))}
    (message,) = checked_chat("the answer", [given | {"role": "assistant"}])
    return {"response": message["content"], "turn": {name: message[name] for name in _MORE if message.get(name)}}
