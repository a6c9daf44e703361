"""Answers in OpenAI's shape: how a request's events become them, and how they are sent, whole or as a stream.

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
from typing import ClassVar

from fastapi import Request
from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from skipdecode.common.jsonl import in_one_line
from skipdecode.engine.requests import StepOutput
from skipdecode.generation.calls import Call, CallReader
from skipdecode.generation.detokenizer import Piece, TokenTexts
from skipdecode.serving.errors import ApiError
from skipdecode.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest
from skipdecode.serving.service import Service
from skipdecode.serving.stream_state import Event, StreamState, merge


class ResponseBuilder(ABC):
    """Makes the answer to one request. Two shapes, one interface.

    `model`: the model's name as clients see it. `texts`: names and bytes of tokens, for log-probabilities.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, stream: StreamState, body: GenerationRequest, model: str, texts: TokenTexts) -> None:
        self._stream = stream
        self._sequences = stream.sequences
        self._texts = texts
        self._logprobs = body.top_logprobs_wanted is not None
        self._shows_every_token = self._logprobs or self._sequences.trace  # also one that has no text
        self._options = body.stream_options
        self._sent = 0  # tokens
        self._lengths = [0] * len(stream.choices)
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @abstractmethod
    def _content(self, event: Event, *, complete: bool) -> dict[str, object]:
        """The field that has the text of a whole choice, or what is new in a chunk; called before `_fields`."""

    @abstractmethod
    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        """Log-probabilities of tokens of a choice."""

    def response(self, events: Sequence[Event]) -> bytes:
        """The JSON of the response, from all tokens of a request that finished."""
        choices = [self._content(event, complete=True) | self._fields(event) for event in events]
        usage = self._usage(self._stream.completion_tokens)
        answer = {"choices": choices, "usage": usage, "skipdecode": self._stream.summary()}
        return to_json(self._head | {"object": self.kind} | answer)

    def opening(self) -> bytes:
        """The first bytes of a stream, before any token."""
        return b""

    def chunks(self, events: Sequence[Event]) -> bytes:
        """Server-sent events for tokens that were taken; ends with `[DONE]` if those are the last."""
        summary = self._stream.summary() if self._stream.finished else None
        self._sent += sum(len(event.pieces) for event in events)
        shown = [event for event in events if event.text or event.finish_reason or self._shows_every_token]
        choices = [self._content(event, complete=False) | self._fields(event) for event in shown]
        # Text that may begin a call is held back.
        choices = [c for c in choices if c.get("delta", c) or c["finish_reason"] or self._shows_every_token]
        lines = []
        for choice in choices:
            last = choice is choices[-1] and not self._options.include_usage
            lines.append(self._chunk([choice], summary if last else None))
        if summary is not None:
            if self._options.include_usage:
                lines.append(self._chunk([], summary))
            lines.append(b"data: [DONE]\n\n")
        return b"".join(lines)

    def _chunk(self, choices: list[dict[str, object]], summary: dict[str, object] | None) -> bytes:
        fields: dict[str, object] = self._head | {"object": self.chunk_kind, "choices": choices}
        if self._options.include_usage:
            sent = self._sent if summary is None else self._stream.completion_tokens
            fields["usage"] = self._usage(sent) if summary or self._options.continuous_usage_stats else None
        if summary is not None:
            fields["skipdecode"] = summary
        return server_sent_event(fields)

    def _usage(self, completion_tokens: int) -> dict[str, object]:
        return {
            "prompt_tokens": self._sequences.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._sequences.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._stream.cached_tokens},
        }

    def _fields(self, event: Event) -> dict[str, object]:
        """Fields of choices of every shape."""
        logprobs = self._logprobs_of(event.choice, [*event.prompt, *event.pieces]) if self._logprobs else None
        fields: dict[str, object] = {"index": event.choice, "logprobs": logprobs, "finish_reason": event.finish_reason}
        if not self._sequences.trace:
            return fields
        tokens = [
            {"id": output.token, "text": text, "position": output.position, "layers": output.layers}
            for output, text, _ in event.pieces
        ]
        return fields | {"skipdecode": {"tokens": tokens}}


class CompletionResponseBuilder(ResponseBuilder):
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, stream: StreamState, body: CompletionRequest, model: str, texts: TokenTexts) -> None:
        super().__init__(stream, body, model, texts)
        self._logprobs, self._ranks = body.logprobs is not None, body.prompt_logprobs is not None

    def _fields(self, event: Event) -> dict[str, object]:
        fields = super()._fields(event)
        if self._ranks:
            fields["prompt_logprobs"] = [None, *starmap(self._ranked, self._stream.choices[event.choice].scores)]
        return fields

    def _ranked(self, token: int, logprob: float, top: Sequence[tuple[int, float]]) -> dict[str, dict[str, object]]:
        """A token of the prompt and its top tokens, by their numbers; the rank of one that is no top token is null."""
        ranks = {token: None} | {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
        values = {token: logprob} | dict(top)
        return {
            str(token_id): {"logprob": values[token_id], "rank": rank, "decoded_token": self._texts.name(token_id)}
            for token_id, rank in ranks.items()
        }

    def _content(self, event: Event, *, complete: bool) -> dict[str, object]:
        return {"text": event.text}

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        names, logprobs, tops, offsets = list[str](), list[object](), list[object](), list[int]()
        for out, text, token_bytes in pieces:
            is_first = out.position < 0 and math.isnan(out.logprob)  # of a prompt: nothing predicts it
            names.append(self._texts.name(out.token, token_bytes))
            logprobs.append(None if is_first else out.logprob)
            tops.append(None if is_first else self._top(out, token_bytes))
            offsets.append(self._lengths[index])
            self._lengths[index] += len(text)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, out: StepOutput, token_bytes: bytes | None) -> dict[str, float]:
        """The top tokens and the chosen one; of tokens with one text, the later ones are named by their numbers."""
        named: dict[str, float] = {self._texts.name(out.token, token_bytes): out.logprob}
        for token, logprob in out.top:
            if token != out.token:
                name = self._texts.name(token)
                named[f"token_id:{token}" if name in named else name] = logprob
        return named


class ChatResponseBuilder(ResponseBuilder):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, stream: StreamState, body: ChatRequest, model: str, texts: TokenTexts) -> None:
        super().__init__(stream, body, model, texts)
        calls = stream.sequences.calls
        self._readers = [] if calls is None else [CallReader(calls, body.calling) for _ in stream.choices]

    def opening(self) -> bytes:
        """The role of each choice."""
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(self._chunk([{"index": i, **first}], None) for i in range(len(self._stream.choices)))

    def _content(self, event: Event, *, complete: bool) -> dict[str, object]:
        text, calls = event.text, list[Call]()
        if self._readers:
            text, calls = self._readers[event.choice].push(text, last=event.finish_reason is not None)
        message: dict[str, object] = {"tool_calls": calls} if calls else {}
        if complete:
            content = None if calls and not text else text
            return {"message": {"role": "assistant", "content": content, "refusal": None, **message}}
        return {"delta": {"content": text, **message} if text else message}

    def _fields(self, event: Event) -> dict[str, object]:
        fields = super()._fields(event)
        if event.finish_reason == "stop" and self._readers and self._readers[event.choice].count:
            fields["finish_reason"] = "tool_calls"
        return fields

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, object]:
        content = []
        for output, _, shown in pieces:
            if shown is None:
                continue  # not in the message
            chosen = self._entry(output.token, output.logprob, shown)
            top = [chosen if token == output.token else self._entry(token, value) for token, value in output.top]
            content.append(chosen | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float, shown: bytes | None = None) -> dict[str, object]:
        text = self._texts.inside(token) if shown is None else shown
        listed = list(text) if text or shown is not None else None
        return {"token": self._texts.name(token, shown), "logprob": logprob, "bytes": listed}


def server_sent_event(data: dict[str, object]) -> bytes:
    return b"data: " + in_one_line(to_json(data)) + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """Server-sent events of a request that was submitted."""

    def __init__(self, stream: StreamState, builder: ResponseBuilder, service: Service) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        # For proxies that would collect the stream.
        self.headers["X-Accel-Buffering"] = "no"
        self._stream = stream
        self._builder = builder
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._service.model.limits.stall_seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, in_time)
        except* TimeoutError:
            self._stream.outcome = "slow_reader"
        finally:
            _close(self._stream, self._service, scope)

    async def _events(self) -> AsyncIterator[bytes]:
        unseen: list[Event] = []
        yield self._builder.opening()
        try:
            async for events in self._stream.events():
                unseen += events  # a token may have no text yet: a character's first bytes, or held back for a stop
                if chunks := self._builder.chunks(events):
                    yield chunks
                    self._stream.note_written(unseen, self._service.metrics)
                    unseen = []
        except ApiError as error:
            yield server_sent_event(error.body())


async def collect(stream: StreamState, service: Service, request: Request) -> list[Event]:
    """Wait for all tokens of a request: one event for each choice, in their order.

    Raises ApiError: it failed.
    """
    answer: dict[int, Event] = {}
    client = asyncio.create_task(_end_with(request, stream))
    try:
        async for events in stream.events():
            for event in events:
                merge(answer, event)
            stream.note_written(events, service.metrics)
    finally:
        client.cancel()
        _close(stream, service, request.scope)
    return [answer[choice] for choice in sorted(answer)]


def _close(stream: StreamState, service: Service, scope: Scope) -> None:
    """Free what a request still holds; note how it ended."""
    stream.closed = True
    scope["state"]["outcome"] = stream.outcome
    tokens = stream.completion_tokens
    scope["state"]["log"] |= {"completion_tokens": tokens} | (stream.times() if tokens else {})
    if not stream.finished:
        service.worker.cancel(stream)


async def _end_with(request: Request, stream: StreamState) -> None:
    """Fail a request when its client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.put([ApiError(499, "cancelled", "the client went away")])
