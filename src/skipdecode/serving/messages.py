"""Chats as clients send them and as their text, their tools, and what the bodies of all requests have in common.

Of tools: how models write calls, calls in a text that comes in parts, and the grammar of a call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from skipdecode.data.chats import render_chat, template_fault, unread_variable, unused_fields
from skipdecode.data.records import checked_chat, checked_text
from skipdecode.errors import DataError, ModelLoadError
from skipdecode.generation.grammar import JSON_OPTIONS
from skipdecode.serving.errors import ApiError, invalid


def _whole_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is no text") from None
    return text


Text = Annotated[str, AfterValidator(_whole_text)]
Neutral = Mapping[str, tuple[Any, ...]]


class Strict(BaseModel):
    """Fields that are known, of the right type. What is null, or changes nothing, is as good as left out."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_implemented(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.model_fields or name not in cls.neutral:
                kept[name] = value
            elif not any(_same(value, neutral) for neutral in cls.neutral[name]):
                accepted = "".join(f", or give {neutral!r}" for neutral in cls.neutral[name])
                message = f"{name} is not implemented: leave it out{accepted}"
                raise ApiError(400, "unsupported_field", message, name)
        return kept


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: Text


class _Function(Strict):
    name: Text
    arguments: Text = Field("{}", description="a JSON object, as text")


class ToolCall(Strict):
    """A call of a tool, in an assistant's message."""

    id: Text | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: _Function


class Message(Strict):
    """One message of a chat; an answer of this server, or of OpenAI's, may be sent back as it came."""

    neutral = {"annotations": ([],), "audio": (), "function_call": (), "refusal": ()}
    type: Literal["text", "message"] | None = Field(None, description="accepted; says nothing more than the role")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: Text | None = Field(None, description="refused if the chat template does not use it")
    tool_calls: list[ToolCall] = []
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise invalid("the content of a message is missing: give text", "messages")
        if self.tool_calls and self.role != "assistant":
            message = f"tool_calls belong to an assistant's message, not to the role {self.role}: leave them out"
            raise invalid(message, "messages")
        return self

    def plain(self) -> dict[str, Any]:
        """For the chat template, which takes the arguments of calls as objects."""
        told = self.model_dump(exclude_none=True, exclude={"type": True, "tool_calls": {"__all__": {"index"}}})
        told |= {"role": "system"} if self.role == "developer" else {}
        return checked_chat("messages", [told])[0]


Variables = dict[str, Any]
VARIABLES = "variables of the chat template, such as enable_thinking"


@dataclass(frozen=True)
class Chat:
    """Messages, and what else their chat template is given."""

    messages: list[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


# ---------------------------------------------------------------------- the text of a chat


def chat_text(tokenizer: Any, chat: Chat, defaults: Mapping[str, Any] = {}) -> str:
    """The prompt of a chat, up to where the answer begins; `defaults` are variables that the request may change.

    Raises ApiError: the template refuses the chat, or does not use one of its fields.
    """
    if (fault := template_fault(tokenizer)) is not None:
        raise invalid(f"{fault}: use completions", "messages")
    variables = {**defaults, **_variables(tokenizer, chat)}
    try:
        messages = [message.plain() for message in chat.messages]
        text = render_chat(tokenizer, messages, chat.tools, variables=variables)
        if unused := unused_fields(tokenizer, messages, chat.tools, text, variables):
            raise _unsupported(name := min(unused), name if name == "tools" else f"messages.{name}")
        return checked_text("the rendered prompt", text)
    except (DataError, ModelLoadError) as e:
        raise invalid(str(e), "messages") from None


def _variables(tokenizer: Any, chat: Chat) -> Mapping[str, Any]:
    """The variables that a request gives to the template."""
    if (unread := unread_variable(tokenizer, chat.variables, chat.tools or None)) is not None:
        raise _unsupported(unread, f"chat_template_kwargs.{unread}"[:100])
    effort = chat.reasoning_effort
    if effort is None:
        return chat.variables
    made: dict[str, Any] = {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})
    made = {name: value for name, value in made.items() if unread_variable(tokenizer, [name]) is None}
    if not made:
        raise _unsupported("reasoning_effort", "reasoning_effort")
    return made | dict(chat.variables)


def _unsupported(name: str, param: str) -> ApiError:
    message = f"this model's chat template does not use {name[:100]}: leave it out"
    return ApiError(400, "unsupported_field", message, param)


_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class _Declared(Strict):
    name: _Name
    description: Text | None = None
    parameters: dict[str, Any] = Field({})
    strict: bool = Field(False, description="accepted; a schema holds where tool_choice demands a call")


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: _Declared


class _Named(Strict):
    name: _Name


class NamedTool(Strict):
    """The function that the model has to call."""

    type: Literal["function"]
    function: _Named


class CallForm(NamedTuple):
    """How a model writes a call: a JSON object with `name` and `arguments` (the key) between `begin` and `end`.

    `begins` matches the begin in a text. Without an end, the calls are the whole text.
    """

    arguments: str
    begin: str
    end: str
    begins: re.Pattern[str]

    @classmethod
    def of(cls, template: str) -> CallForm | None:
        """The form that a chat template asks for: that of Hermes and Qwen, or that of Llama 3; None for others."""
        if "<tool_call>" in template and "<function=" not in template:
            return _HERMES
        return _LLAMA if "<|python_tag|>" in template or "ipython" in template else None

    def grammar(self, tools: Iterable[Tool], words: Mapping[int, Any], *, several: bool) -> str:
        """A grammar in Lark's syntax: one call, or one and more, of these tools; `words` are the added tokens."""
        ids = {f"{word}": f"<[{number}]>" for number, word in words.items() if not word.special}

        def lark(text: str) -> str:
            """A text; of `begin` and `end`, what is one token of the model is that token."""
            return " ".join(ids.get(part) or json.dumps(part) for part in re.split(r"(</?tool_call>)", text) if part)

        rules = []
        for place, tool in enumerate(tools):
            given = tool.function.parameters or {"maxProperties": 0}
            schema = {"type": "object"} | given | {"x-guidance": JSON_OPTIONS}
            begin = f'{self.begin}{{"name": "{tool.function.name}", "{self.arguments}": '
            rules += [f"c{place}: {lark(begin)} a{place} {lark('}' + self.end)}"]
            rules += [f"a{place}: %json {json.dumps(schema)}"]
        names = " | ".join(f"c{place}" for place in range(len(rules) // 2))
        more = ' ("\\n" call)*' if several and self.end else ""
        return "\n".join([f"start: call{more}", f"call: {names}", *rules])


_HERMES = CallForm("arguments", "<tool_call>\n", "\n</tool_call>", re.compile(r"\s*<tool_call>"))
_LLAMA = CallForm("parameters", "", "", re.compile(r"\A\s*(?=\{)"))


class CallReader:
    """Finds the calls in a text that comes in parts. What is no call of one of the tools stays text.

    A text that begins with `{` is read as Llama's: some models leave out the marks that their template asks for.

    Attribute `count`: calls so far.
    """

    def __init__(self, form: CallForm, names: Iterable[str], most: int | None) -> None:
        self._form, self._names, self._most = form, set(names), most
        self._rest, self._begin, self._whole = "", "", True
        self.count = 0

    def push(self, text: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Take the next part; returns the text and the calls, in OpenAI's form, that are certain now."""
        self._rest += text
        if self._whole and not self._begin and self._rest.lstrip().startswith("{"):
            self._form = _LLAMA
        said, calls, end = "", [], self._form.end.strip()
        while True:
            found = None if self._begin or not (self._whole or end) else self._form.begins.search(self._rest)
            if found is not None:
                said += self._rest[: found.start()]
                self._begin, self._rest = found[0] or "{", self._rest[found.end() :]
            if not self._begin:
                certain = len(self._rest) if last and not self.count else self._certain(last=last)
                said, self._rest = said + self._rest[:certain], self._rest[certain:]
                break
            inside, closed, rest = self._rest.partition(end) if end else (self._rest, "", "")
            if not closed and not last:
                break
            made = self._calls(inside)
            said += "" if made else self._begin.removesuffix("{") + inside + closed
            calls += made
            self._begin, self._rest, self._whole = "", rest, False
        self._whole = self._whole and not said
        return said, calls

    def _certain(self, *, last: bool) -> int:
        """The number of characters that are no part of a call: neither its begin nor white space beside that."""
        begin, text = "" if last else self._form.begin.strip(), self._rest
        size = next((n for n in range(min(len(begin) - 1, len(text)), 0, -1) if text.endswith(begin[:n])), 0)
        return len(text[: len(text) - size].rstrip())

    def _calls(self, text: str) -> list[dict[str, Any]]:
        """The calls of a text of JSON objects; none if it has anything else."""
        decoder, calls, text = json.JSONDecoder(), [], text.strip()
        while text:
            try:
                call, end = decoder.raw_decode(text)
                name, given = call["name"], call.get("arguments", call.get("parameters", {}))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return []
            if name not in self._names or not isinstance(given, dict):
                return []
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
            text = text[end:].lstrip("; \n")
        calls = calls if self._most is None else calls[: self._most - self.count]
        self.count += len(calls)
        return [{"index": self.count - len(calls) + place, **call} for place, call in enumerate(calls)]
