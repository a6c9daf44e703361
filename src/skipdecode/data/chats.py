"""Chats and special tokens: what a chat template renders, the tools in it, and token ids with one start token."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from skipdecode.common.jsonl import Fields
from skipdecode.common.types import Tokenizer
from skipdecode.data.messages import REASONING, Message, checked_text
from skipdecode.errors import DataError, ModelLoadError, OptionError

Tool = Fields
_NO_FIELDS: Fields = MappingProxyType({})
_CHOICES = (
    'none, auto, required, {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}, with names of `tools`'
)
_PROBE = [{"role": "user", "content": "a"}]
_TOOL_FIELDS = ("name", "tool_call_id")
_MARK = "8c1f0e"  # a text that stands nowhere else in a rendered chat


def token_ids(tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
    """Token ids of texts, with the tokenizer's special tokens where `special`.

    A text that begins with the start token gets no second one.
    """
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=special, verbose=False).input_ids
    start, name = tokenizer.bos_token_id, tokenizer.bos_token
    if not special or start is None:
        return rows
    return [
        ids[1:] if ids[:2] == [start, start] and text.startswith(name) else ids
        for ids, text in zip(rows, texts, strict=True)
    ]


def chat_fault(tokenizer: Tokenizer) -> str | None:
    """Why a tokenizer renders no chats, None if it does; of several templates, the one named "default" is used.

    Raises ModelLoadError if the template is no valid program.
    """
    if (fault := template_fault(tokenizer)) is None:
        _rendered(tokenizer, _PROBE, ())  # the template may refuse this chat and take others
    return fault


def template_fault(tokenizer: Tokenizer) -> str | None:
    """Why a tokenizer has no chat template to render with, None if it has one; see `chat_fault`."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return "the model's tokenizer has no chat template"
    if isinstance(template, Mapping) and "default" not in template:
        return f"none of the tokenizer's chat templates is named 'default': there is {', '.join(map(repr, template))}"
    return None


def unread_variable(tokenizer: Tokenizer, names: Iterable[str], tools: Sequence[Tool] | None = None) -> str | None:
    """The first of these variables that the chat template does not use; None if it uses all."""
    template = str(tokenizer.get_chat_template(tools=tools))
    arguments = inspect.signature(tokenizer.apply_chat_template).parameters
    return next((n for n in names if n in arguments or not re.search(rf"\b{re.escape(n)}\b", template)), None)


def checked_variables(tokenizer: Tokenizer, variables: Fields | None) -> Fields:
    """The variables of every chat, none for None; raises OptionError if the chat template does not use one."""
    if not variables:
        return {}
    if not isinstance(variables, Mapping):
        raise OptionError("chat_template_kwargs", variables, "names with values")
    fault = template_fault(tokenizer)
    unread = None if fault else unread_variable(tokenizer, variables)
    if fault or unread is not None:
        accepted = f"none: {fault}" if fault else f"variables that the chat template uses, not {unread!r}"
        raise OptionError("chat_template_kwargs", dict(variables), accepted)
    return variables


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    answer: bool = True,
    variables: Fields = _NO_FIELDS,
) -> str:
    """The text of a chat, up to where an answer begins if `answer`; `variables` are further ones of the template.

    The role `developer` becomes `system`, as OpenAI says, reasoning gets another of its names, and text becomes a part,
    where the template does not read what the messages have.

    Raises DataError: the template refuses the chat; ModelLoadError: the template is no valid program.
    """
    try:
        template = str(tokenizer.get_chat_template(tools=list(tools) or None))
        adapted = [_adapted(message, template) for message in messages]
        if _reads_parts(tokenizer, template):
            adapted = [message | {"content": _in_parts(message["content"])} for message in adapted]
        text = tokenizer.apply_chat_template(
            adapted, tools=list(tools) or None, tokenize=False, add_generation_prompt=answer, **variables
        )
    except Exception as e:  # A template is a program of the checkpoint's: it may raise anything.
        reason, jinja = " ".join(str(e).split()), sys.modules.get("jinja2")  # which transformers may do without
        if jinja is not None and isinstance(e, jinja.TemplateSyntaxError):
            raise ModelLoadError(f"the model's chat template is broken: line {e.lineno}: {reason}") from e
        raise DataError(f"the chat template refuses the record: {reason}") from e
    return checked_text("the chat", str(text))


def _adapted(message: Message, template: str) -> Message:
    """A message with the role and the name of its reasoning that a template reads."""
    adapted, read = dict(message), _names_read(template)
    if message["role"] == "developer" and "developer" not in read:
        adapted["role"] = "system"
    reasoning = [name for name in REASONING if name in message]
    wanted = [name for name in REASONING if name in read]
    if reasoning and wanted and not {*reasoning} & {*wanted}:
        adapted[wanted[0]] = adapted.pop(reasoning[0])
    return adapted


@lru_cache(maxsize=8)  # it keeps tokenizers
def _reads_parts(tokenizer: Tokenizer, template: str) -> bool:
    """Whether a template writes a text in a list of parts, and leaves out one that is the content itself."""

    def writes(content: object) -> bool:
        chat = [{"role": "user", "content": content}]
        try:
            return _MARK in tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
        except Exception:  # as in `render_chat`
            return False

    return not writes(_MARK) and writes(_in_parts(_MARK))


def _in_parts(text: str) -> list[Fields]:
    return [{"type": "text", "text": text}]


@lru_cache
def _names_read(template: str) -> set[str]:
    """The role and the names of reasoning that a template has as texts or as attributes."""
    names = ("developer", *REASONING)
    return {name for name in names if re.search(rf"""\.{name}\b|['"]{name}['"]""", template)}


def unused_roles(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], variables: Fields = _NO_FIELDS
) -> set[str]:
    """Roles of which the template leaves out a message; answers do not count, since some are left out by intent."""
    if {message["role"] for message in messages} <= {"user", "assistant"}:
        return set()
    marked = [m | {"content": f"{_MARK}-{n}." if m["content"] else ""} for n, m in enumerate(messages)]
    text = _rendered(tokenizer, marked, tools, variables)
    # A template that refuses the marks says nothing.
    return {m["role"] for m in marked if text is not None and m["content"] not in text} - {"assistant"}


def unused_fields(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], text: str, variables: Fields = _NO_FIELDS
) -> set[str]:
    """Fields of the messages, and `tools`, without which the template renders the same `text`.

    A tool's `name` and `tool_call_id` do not count: they say to which call its message belongs, as its place does.
    """
    names = {name for message in messages for name in message if message["role"] != "tool" or name not in _TOOL_FIELDS}
    names -= {"role", "content"}
    without = {n: ([{k: v for k, v in m.items() if k != n} for m in messages], tools) for n in names}
    if tools:
        without["tools"] = list(messages), ()
    return {name for name, rest in without.items() if _rendered(tokenizer, *rest, variables) == text}


def _rendered(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool], variables: Fields = _NO_FIELDS
) -> str | None:
    try:
        return render_chat(tokenizer, messages, tools, variables=variables)
    except DataError:
        return None


def response_ids(texts: Sequence[str], tokenizer: Tokenizer, *, chat: bool = False) -> list[list[int]]:
    """Token ids of responses, without the prompt; they end with the end token if the tokenizer has one.

    With `chat`, a response is what the chat template writes for an answer; if no token that was added to the vocabulary
    ends it, such as ``<|im_end|>``, the tokenizer's end token follows.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if not chat:
        return [[*ids, *end] for ids in token_ids(tokenizer, texts, special=False)]
    before = render_chat(tokenizer, _PROBE)
    (head,) = token_ids(tokenizer, [before], special=False)
    turns = [_turn(tokenizer, before, text) for text in texts]
    # Behind the prompt, because some tokenizers put a space before a text.
    behind = token_ids(tokenizer, [before + turn for turn in turns], special=False)
    alone = token_ids(tokenizer, turns, special=False)
    rows = [b[len(head) :] if b[: len(head)] == head else a for a, b in zip(alone, behind, strict=True)]
    added = tokenizer.added_tokens_decoder
    ended = [not turn.endswith(text) and row[-1] in added for row, turn, text in zip(rows, turns, texts, strict=True)]
    return [row if is_ended else [*row, *end] for row, is_ended in zip(rows, ended, strict=True)]


def _turn(tokenizer: Tokenizer, before: str, text: str) -> str:
    """Render an answer behind the prompt `before` with the template, without white space behind the answer's end.

    White space of the answer itself stays, unless the template takes it off.
    """
    rendered = _with_answer(tokenizer, text)
    # The text of an answer may be part of what ends it, such as "end" of <|im_end|>, so the end is found behind another
    # text.
    _, mark, tail = _with_answer(tokenizer, _MARK).rpartition(_MARK)
    if not rendered.startswith(before):  # the beginning of an answer is written otherwise than that of a finished one
        return text + tail.rstrip() if mark else text
    turn = rendered[len(before) :]
    return turn.removesuffix(tail) + tail.rstrip() if turn.endswith(text + tail) else turn.rstrip()


def _with_answer(tokenizer: Tokenizer, text: str, extra: Fields = _NO_FIELDS, tools: Sequence[Tool] = ()) -> str:
    return render_chat(tokenizer, [*_PROBE, {"role": "assistant", "content": text, **extra}], tools, answer=False)


def turn_text(tokenizer: Tokenizer, text: str, extra: Fields, tools: Sequence[Tool]) -> str:
    """An answer with its calls of tools and its reasoning (`extra`) as the chat template writes it; `text` if it does
    not write them.

    Raises DataError: the template refuses the answer.
    """
    if template_fault(tokenizer) is not None:
        return text
    rendered, opening = _with_answer(tokenizer, text, extra, tools), render_chat(tokenizer, _PROBE, tools)
    other, _, end = _with_answer(tokenizer, _MARK, {}, tools).rpartition(_MARK)
    head = next((head for head in (opening, other) if rendered.startswith(head.rstrip())), None)
    if head is None or rendered == _with_answer(tokenizer, text, {}, tools):
        return text
    turn = rendered.removesuffix(end) if rendered.endswith(end) else rendered.rstrip().removesuffix(end.rstrip())
    # White space behind the head that the template does not write there is not the answer's.
    return turn.removeprefix(head) if turn.startswith(head) else turn.removeprefix(head.rstrip()).lstrip()


@dataclass(frozen=True)
class ToolChoice:
    """The tools that the chat template sees, those that may be called, and whether one has to be.

    `several`: whether there may be several calls.
    """

    shown: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    demanded: bool = False
    several: bool = True

    @classmethod
    def of(cls, tools: Sequence[Tool], choice: object = "auto", *, several: bool = True) -> ToolChoice:
        """Combine OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`.

        Raises OptionError: the choice is not accepted, or names no tool.
        """
        names: set[str | None] = {name_of(tool) for tool in tools} - {None}
        match choice:
            case "none":
                return cls()
            case "auto" | "required":
                mode, allowed = choice, names
            case {"type": "function", "function": {"name": str(name)}}:
                mode, allowed, several = "required", {name}, False
            case {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed_tools},
            }:
                allowed = set(map(name_of, allowed_tools))
            case _:
                raise OptionError("tool_choice", choice, _CHOICES)
        if not allowed <= names or (mode == "required" and not allowed):
            raise OptionError("tool_choice", choice, _CHOICES)
        chosen = tuple(tool for tool in tools if name_of(tool) in allowed)
        return cls(tuple(tools), chosen, mode == "required", several)


def name_of(tool: object) -> str | None:
    """The name of a tool, which OpenAI's form has within `function`; None if it has no text as a name."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
