"""A request's tokens on their way to the client: as a stream, or collected. Frees its rows if the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from skipdecode.serving.errors import ApiError
from skipdecode.serving.request_state import RequestState, Update, merge
from skipdecode.serving.responses import ResponseBuilder, server_sent_event
from skipdecode.serving.service import Service


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
        """See ASGI."""

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
    """All tokens of a request that was submitted: one update for each choice, in their order.

    Raises ApiError: it failed.
    """
    answer: dict[int, Update] = {}
    gone = asyncio.create_task(_gone(request))
    try:
        while not state.finished:
            taking = asyncio.create_task(state.take())
            done, _ = await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            if taking not in done:
                taking.cancel()
                raise ApiError(499, "cancelled", "the client went away")
            for update in taking.result():
                merge(answer, update)
            state.note_written(taking.result(), service.metrics)
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


async def _gone(request: Request) -> None:
    """Returns when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
