"""The text of a request's chat, which the model's chat template makes; a field that it does not use is refused."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from skipdecode.data.chats import render_chat, unused_fields
from skipdecode.data.records import Message, checked_text
from skipdecode.errors import DataError, ModelLoadError
from skipdecode.serving.errors import ApiError
from skipdecode.serving.messages import Chat

_UNREAD = {"tool_call_id"}  # fields that say which messages belong together, which their order says too


def chat_text(tokenizer: Any, chat: Chat) -> str:
    """The prompt of a chat, up to where the answer begins.

    Tool calls are written into the message's text if the template does not write them.

    Raises
    ------
    ApiError
        The template refuses the chat, or does not use one of its fields.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise ApiError(400, "invalid_value", "the model's tokenizer has no chat template: use completions", "messages")
    messages = [message.plain() for message in chat.messages]
    variables = _variables(tokenizer, chat)
    try:
        text = render_chat(tokenizer, messages, variables=variables)
        unused = unused_fields(tokenizer, messages, (), text, variables) - _UNREAD
        if "tool_calls" in unused:
            messages = [_with_calls(message) for message in messages]
            text = render_chat(tokenizer, messages, variables=variables)
        if others := unused - {"tool_calls"}:
            raise _unsupported(min(others), f"messages.{min(others)}")
        return checked_text("the rendered prompt", text)
    except (DataError, ModelLoadError) as e:
        raise ApiError(400, "invalid_value", str(e), "messages") from None


def _variables(tokenizer: Any, chat: Chat) -> Mapping[str, Any]:
    """The variables that a request gives to the template."""
    template = str(tokenizer.get_chat_template())
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in chat.variables:
        if name in own or not _reads(template, name):
            raise _unsupported(name, f"chat_template_kwargs.{name}"[:100])
    effort = chat.reasoning_effort
    if effort is None:
        return chat.variables
    made: dict[str, Any] = {"reasoning_effort": effort, "enable_thinking": False if effort == "none" else None}
    made = {name: value for name, value in made.items() if value is not None and _reads(template, name)}
    if not made:
        raise _unsupported("reasoning_effort", "reasoning_effort")
    return made | dict(chat.variables)


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _unsupported(name: str, param: str) -> ApiError:
    message = f"this model's chat template does not use {name[:100]}: leave it out"
    return ApiError(400, "unsupported_field", message, param)


def _with_calls(message: Message) -> Message:
    """A message whose tool calls are part of its text, in the form that many models are trained on."""
    calls = "".join(
        f"\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls", ())
    )
    return message | {"content": (message["content"] + calls).lstrip("\n")} if calls else message
