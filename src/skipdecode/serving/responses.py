"""Answers in OpenAI's shape: how a request's updates become them, and how they are sent, whole or as a stream.

The rows of a request are freed if its client goes.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from itertools import starmap
from typing import Any, ClassVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from skipdecode.common.jsonl import in_one_line
from skipdecode.engine.requests import StepOutput
from skipdecode.generation.calls import CallReader
from skipdecode.generation.detokenizer import Piece, TokenTexts
from skipdecode.serving.errors import ApiError
from skipdecode.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest
from skipdecode.serving.request_state import RequestState, Summary, Update, merge
from skipdecode.serving.service import Service


class ResponseBuilder(ABC):
    """Makes the answer to one request. Two shapes, one interface.

    `model`: the model's name as clients see it. `texts`: names and bytes of tokens, for log-probabilities.
    """

    prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, state: RequestState, body: GenerationRequest, model: str, texts: TokenTexts) -> None:
        self._state = state
        self._texts = texts
        self._logprobs = body.top_logprobs_wanted is not None
        self._tells_every_token = self._logprobs or state.trace  # also one that has no text
        self._options = body.stream_options
        self._sent = 0  # tokens
        self._lengths = [0] * len(state.choices)
        self._head: dict[str, Any] = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    @abstractmethod
    def _content(self, update: Update, *, whole: bool) -> dict[str, Any]:
        """The field that has the text of a whole choice, or what is new in a chunk; called before `_fields`."""

    @abstractmethod
    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Log-probabilities of tokens of a choice."""

    def whole(self, updates: Sequence[Update]) -> bytes:
        """The JSON of the response, from all tokens of a request that finished."""
        choices = [self._content(update, whole=True) | self._fields(update) for update in updates]
        summary = self._state.summary()
        told = {"choices": choices, "usage": self._usage(summary.completion_tokens), "skipdecode": summary}
        return to_json(self._head | {"object": self.object} | told)

    def opening(self) -> bytes:
        """The first bytes of a stream, before any token."""
        return b""

    def chunks(self, updates: Sequence[Update]) -> bytes:
        """Server-sent events for tokens that were taken; ends with `[DONE]` if those are the last."""
        summary = self._state.summary() if self._state.finished else None
        self._sent += sum(len(update.pieces) for update in updates)
        told = [u for u in updates if u.text or u.finish_reason or self._tells_every_token]
        choices = [self._content(update, whole=False) | self._fields(update) for update in told]
        # Text that may begin a call is held back.
        choices = [c for c in choices if c.get("delta", c) or c["finish_reason"] or self._tells_every_token]
        lines = []
        for choice in choices:
            last = choice is choices[-1] and not self._options.include_usage
            lines.append(self._chunk([choice], summary if last else None))
        if summary is not None:
            if self._options.include_usage:
                lines.append(self._chunk([], summary))
            lines.append(b"data: [DONE]\n\n")
        return b"".join(lines)

    def _chunk(self, choices: list[dict[str, Any]], summary: Summary | None) -> bytes:
        fields: dict[str, Any] = self._head | {"object": self.chunk_object, "choices": choices}
        if self._options.include_usage:
            sent = self._sent if summary is None else summary.completion_tokens
            fields["usage"] = self._usage(sent) if summary or self._options.continuous_usage_stats else None
        if summary is not None:
            fields["skipdecode"] = summary
        return server_sent_event(fields)

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._state.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._state.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._state.cached_tokens},
        }

    def _fields(self, update: Update) -> dict[str, Any]:
        """Fields of choices of every shape."""
        logprobs = self._logprobs_of(update.choice, update.all_pieces) if self._logprobs else None
        fields = {"index": update.choice, "logprobs": logprobs, "finish_reason": update.finish_reason}
        if not self._state.trace:
            return fields
        tokens = [
            {"id": out.token, "text": text, "position": out.position, "layers": out.layers}
            for out, text, _ in update.pieces
        ]
        return fields | {"skipdecode": {"tokens": tokens}}


class CompletionResponseBuilder(ResponseBuilder):
    """/v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, state: RequestState, body: CompletionRequest, *further: Any) -> None:
        super().__init__(state, body, *further)
        self._logprobs, self._ranks = body.logprobs is not None, body.prompt_logprobs is not None

    def _fields(self, update: Update) -> dict[str, Any]:
        fields = super()._fields(update)
        if self._ranks:
            fields["prompt_logprobs"] = [None, *starmap(self._ranked, self._state.choices[update.choice].scores)]
        return fields

    def _ranked(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, dict[str, Any]]:
        """A token of the prompt and its top tokens, by their numbers; the rank of one that is no top token is null."""
        ranks = {token: None} | {each: rank for rank, (each, _) in enumerate(top, 1)}
        values = {token: logprob} | dict(top)
        return {
            str(each): {"logprob": values[each], "rank": rank, "decoded_token": self._texts.name(each)}
            for each, rank in ranks.items()
        }

    def _content(self, update: Update, *, whole: bool) -> dict[str, Any]:
        return {"text": update.text}

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        offsets = []
        for piece in pieces:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(piece.text)
        return {
            "tokens": [self._texts.name(out.token, own) for out, _, own in pieces],
            "token_logprobs": [None if _is_first(out) else out.logprob for out, _, _ in pieces],
            "top_logprobs": [None if _is_first(out) else self._top(out, own) for out, _, own in pieces],
            "text_offset": offsets,
        }

    def _top(self, out: StepOutput, own: bytes | None) -> dict[str, float]:
        """The top tokens and the chosen one; of tokens with one text, the later ones are named by their numbers."""
        named: dict[str, float] = {self._texts.name(out.token, own): out.logprob}
        for token, logprob in out.top:
            if token != out.token:
                name = self._texts.name(token)
                named[f"token_id:{token}" if name in named else name] = logprob
        return named


def _is_first(output: StepOutput) -> bool:
    """Whether a token is the first of a prompt, which nothing predicts."""
    return output.position < 0 and math.isnan(output.logprob)


class ChatResponseBuilder(ResponseBuilder):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        """The role of each choice."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._chunk([{"index": i, **first}], None) for i in range(len(self._state.choices)))

    def __init__(self, state: RequestState, body: ChatRequest, *further: Any) -> None:
        super().__init__(state, body, *further)
        self._readers = [CallReader(state.calls, body.calling) for _ in state.choices] if state.calls else []

    def _content(self, update: Update, *, whole: bool) -> dict[str, Any]:
        text: str = update.text
        calls: list[dict[str, Any]] = []
        if self._readers:
            text, calls = self._readers[update.choice].push(text, last=update.finish_reason is not None)
        called = {"tool_calls": calls} if calls else {}
        if whole:
            said = None if calls and not text else text
            return {"message": {"role": "assistant", "content": said, "refusal": None, **called}}
        return {"delta": ({"content": text} if text else {}) | called}

    def _fields(self, update: Update) -> dict[str, Any]:
        fields = super()._fields(update)
        if update.finish_reason == "stop" and self._readers and self._readers[update.choice].count:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        content = []
        for out, _, own in pieces:
            if own is None:
                continue  # not in the message
            chosen = self._entry(out.token, out.logprob, own)
            top = [chosen if token == out.token else self._entry(token, value) for token, value in out.top]
            content.append(chosen | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float, own: bytes | None = None) -> dict[str, Any]:
        shown = self._texts.inside(token) if own is None else own
        told = list(shown) if shown or own is not None else None
        return {"token": self._texts.name(token, own), "logprob": logprob, "bytes": told}


def server_sent_event(data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + in_one_line(to_json(data)) + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """Server-sent events of a request that was submitted."""

    def __init__(self, state: RequestState, builder: ResponseBuilder, service: Service) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        # For proxies that would collect the stream.
        self.headers["X-Accel-Buffering"] = "no"
        self._state = state
        self._builder = builder
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""

        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._service.limits.stall_seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, in_time)
        except* TimeoutError:
            self._state.outcome = "slow_reader"
        finally:
            _close(self._state, self._service, scope)

    async def _events(self) -> AsyncIterator[bytes]:
        unseen: list[Update] = []
        yield self._builder.opening()
        try:
            while not self._state.finished:
                updates = await self._state.take()
                unseen += updates  # a token may have no text yet: a character's first bytes, or held back for a stop
                if chunks := self._builder.chunks(updates):
                    yield chunks
                    self._state.note_written(unseen, self._service.metrics)
                    unseen = []
        except ApiError as error:
            yield server_sent_event(error.body())


async def collect(state: RequestState, service: Service, request: Request) -> list[Update]:
    """Collect all tokens of a request that was submitted: one update for each choice, in their order.

    Raises ApiError: it failed.
    """
    answer: dict[int, Update] = {}
    gone = asyncio.create_task(_end_with(request, state))
    try:
        while not state.finished:
            updates = await state.take()
            for update in updates:
                merge(answer, update)
            state.note_written(updates, service.metrics)
    finally:
        gone.cancel()
        _close(state, service, request.scope)
    return [answer[choice] for choice in sorted(answer)]


def _close(state: RequestState, service: Service, scope: Scope) -> None:
    """Free what a request still holds; note how it ended."""
    state.closed = True
    scope["state"]["outcome"] = state.outcome
    tokens = sum(len(choice.tokens) for choice in state.choices)
    scope["state"]["log"] |= {"completion_tokens": tokens} | (state.times() if tokens else {})
    if not state.finished:
        service.worker.cancel(state)


async def _end_with(request: Request, state: RequestState) -> None:
    """Fail a request when its client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    state.put([ApiError(499, "cancelled", "the client went away")])
