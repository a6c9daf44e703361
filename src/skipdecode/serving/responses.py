"""Answers in OpenAI's shape: their fields, and how a request's events become them, whole or as chunks of a stream.

The same models describe the interface (/openapi.json).
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel

from skipdecode.data.detokenizer import Piece
from skipdecode.serving.errors import ApiError, ExactModel
from skipdecode.serving.protocol import GenerationRequest
from skipdecode.serving.request_state import ChoiceFinish, Event, Finished, RequestState, Summary, Update

__all__ = [
    "ChatResponse",
    "ChatResponseBuilder",
    "CompletionResponse",
    "CompletionResponseBuilder",
    "ResponseBuilder",
    "server_sent_event",
]

# ---------------------------------------------------------------------- fields


class _PromptDetails(ExactModel):
    cached_tokens: int


class _Usage(ExactModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails


class _TracedToken(ExactModel):
    id: int
    text: str
    position: int
    layers: int


class _Trace(ExactModel):
    tokens: list[_TracedToken]


class _CompletionLogprobs(ExactModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _Token(ExactModel):
    token: str
    logprob: float
    bytes: list[int]


class _TokenWithTop(_Token):
    top_logprobs: list[_Token]


class _ChatLogprobs(ExactModel):
    content: list[_TokenWithTop]
    refusal: None


class _AnyChoice(ExactModel):
    index: int
    skipdecode: _Trace | None = None


class _Choice(_AnyChoice):
    finish_reason: ChoiceFinish


class _CompletionChoice(_Choice):
    text: str
    logprobs: _CompletionLogprobs | None


class _AssistantMessage(ExactModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class _ChatChoice(_Choice):
    message: _AssistantMessage
    logprobs: _ChatLogprobs | None


class _Delta(ExactModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class _ChunkChoice(_AnyChoice):
    """Of completions with `text`, of chats with `delta`."""

    text: str | None = None
    delta: _Delta | None = None
    logprobs: _CompletionLogprobs | _ChatLogprobs | None
    finish_reason: ChoiceFinish | None


class _AnyAnswer(ExactModel):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]


class _Answer(_AnyAnswer):
    usage: _Usage
    skipdecode: Summary


class CompletionResponse(_Answer):
    """Of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[_CompletionChoice]


class ChatResponse(_Answer):
    """Of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[_ChatChoice]


class _Chunk(_AnyAnswer):
    choices: list[_ChunkChoice]
    usage: _Usage | None = None
    skipdecode: Summary | None = None


# ---------------------------------------------------------------------- from events


class ResponseBuilder(ABC):
    """Makes the answer to one request. Two shapes, one interface.

    Parameters
    ----------
    model : str
        The model's name as clients see it.
    token_text : callable
        Text of a single token, for log-probabilities.
    """

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    response: ClassVar[type[_Answer]]

    def __init__(
        self, state: RequestState, body: GenerationRequest, model: str, token_text: Callable[[int], str]
    ) -> None:
        self._state = state
        self._token_text = token_text
        self._logprobs = body.top_logprobs_wanted is not None
        self._tells_every_token = self._logprobs or state.trace  # also one that has no text
        self._include_usage = body.include_usage
        self._lengths = [0] * len(state.choices)
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @abstractmethod
    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        """The field that has the text of a whole choice, or what is new in a chunk."""

    @abstractmethod
    def _logprobs_of(self, index: int, pieces: list[Piece]) -> _CompletionLogprobs | _ChatLogprobs:
        """Log-probabilities of tokens of a choice."""

    def whole(self, events: list[Event]) -> bytes:
        """The response, from all events of a request that finished."""
        summary = self._state.summary()
        updates = sorted(_merged(events))
        choices = [self._content(update.text, whole=True) | self._fields(update) for update in updates]
        head = self._head | {"object": self.object}
        return _json(self.response(**head, choices=choices, usage=self._usage(summary), skipdecode=summary))

    def opening(self) -> bytes:
        """What a stream sends before any token."""
        return b""

    def chunks(self, events: list[Event]) -> bytes:
        """Server-sent events for events of the request; ends with `[DONE]` if it finished."""
        summary = self._state.summary() if any(isinstance(event, Finished) for event in events) else None
        updates = [u for u in _merged(events) if u.text or u.finish_reason or self._tells_every_token]
        lines = []
        for update in updates:
            choice = _ChunkChoice(**self._content(update.text, whole=False), **self._fields(update))
            last = update is updates[-1] and not self._include_usage
            lines.append(self._chunk([choice], summary if last else None))
        lines += [server_sent_event(event.body()) for event in events if isinstance(event, ApiError)]
        if summary is not None:
            if self._include_usage:
                lines.append(self._chunk([], summary))
            lines.append(b"data: [DONE]\n\n")
        return b"".join(lines)

    def _chunk(self, choices: list[_ChunkChoice], summary: Summary | None) -> bytes:
        fields: dict[str, Any] = self._head | {"object": self.chunk_object, "choices": choices}
        if self._include_usage:
            fields["usage"] = None if summary is None else self._usage(summary)
        if summary is not None:
            fields["skipdecode"] = summary
        return server_sent_event(_Chunk(**fields))

    def _usage(self, summary: Summary) -> _Usage:
        prompt, completion = summary.prompt_tokens, summary.completion_tokens
        return _Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=_PromptDetails(cached_tokens=self._state.cached_tokens),
        )

    def _fields(self, update: Update) -> dict[str, Any]:
        """What choices of every shape have."""
        fields: dict[str, Any] = {
            "index": update.choice,
            "logprobs": self._logprobs_of(update.choice, update.pieces) if self._logprobs else None,
            "finish_reason": update.finish_reason,
        }
        if self._state.trace:
            fields["skipdecode"] = _Trace(
                tokens=[
                    _TracedToken(id=out.token, text=text, position=out.position, layers=out.layers)
                    for out, text in update.pieces
                ]
            )
        return fields


class CompletionResponseBuilder(ResponseBuilder):
    """/v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"
    response = CompletionResponse

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> _CompletionLogprobs:
        offsets = []
        for piece in pieces:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(piece.text)
        return _CompletionLogprobs(
            tokens=[self._token_text(out.token) for out, _ in pieces],
            token_logprobs=[out.logprob for out, _ in pieces],
            top_logprobs=[{self._token_text(t): value for t, value in out.top} for out, _ in pieces],
            text_offset=offsets,
        )


class ChatResponseBuilder(ResponseBuilder):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    response = ChatResponse

    def opening(self) -> bytes:
        """The role of each choice."""
        delta = _Delta(role="assistant", content="")
        indices = range(len(self._state.choices))
        choices = [_ChunkChoice(index=i, delta=delta, logprobs=None, finish_reason=None) for i in indices]
        return b"".join(self._chunk([choice], None) for choice in choices)

    def _content(self, text: str, *, whole: bool) -> dict[str, Any]:
        if whole:
            return {"message": _AssistantMessage(role="assistant", content=text, refusal=None)}
        return {"delta": _Delta(content=text) if text else _Delta()}

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> _ChatLogprobs:
        content = []
        for out, _ in pieces:
            top = [_Token(**self._entry(token, value)) for token, value in out.top]
            content.append(_TokenWithTop(**self._entry(out.token, out.logprob), top_logprobs=top))
        return _ChatLogprobs(content=content, refusal=None)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def server_sent_event(data: BaseModel) -> bytes:
    """One event of a stream."""
    return b"data: " + _json(data) + b"\n\n"


def _json(data: BaseModel) -> bytes:
    return data.model_dump_json(exclude_unset=True).encode()


def _merged(events: list[Event]) -> list[Update]:
    """Updates, those of a choice as one where the reader was slower than the model; a choice that ends comes later."""
    merged: dict[int, Update] = {}
    for event in events:
        if isinstance(event, Update):
            before = merged.pop(event.choice, None)
            pieces = event.pieces if before is None else before.pieces + event.pieces
            merged[event.choice] = Update(event.choice, pieces, event.finish_reason)
    return list(merged.values())
