"""Chats as clients send them and as their text, their tools, and what the bodies of all requests have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from skipdecode.data.chats import render_chat, template_fault, unread_variable, unused_fields
from skipdecode.data.records import checked_chat, checked_text
from skipdecode.errors import DataError, ModelLoadError
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
    tools: Sequence[Mapping[str, Any]] = ()


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
