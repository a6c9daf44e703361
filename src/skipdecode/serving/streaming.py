"""A request's events on their way to the client: as a stream, or collected. Frees its rows if the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from skipdecode.serving.errors import ApiError
from skipdecode.serving.request_state import Event, Finished, RequestState
from skipdecode.serving.responses import ResponseBuilder, server_sent_event
from skipdecode.serving.service import Service

__all__ = ["EventStreamResponse", "collect"]


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
        unseen: list[Event] = []
        yield self._builder.opening()
        while True:
            events = await self._state.take()
            chunks = self._builder.chunks(events)
            if self._state.closed:
                error = ApiError(400, "slow_reader", "the stream was read too slowly and is cut off")
                yield chunks + server_sent_event(error.body())
                return
            unseen += events  # a token may have no text yet: the first bytes of a character, or held back for a stop
            if chunks:
                yield chunks
                self._state.note_written(unseen, self._service.metrics)
                unseen = []
            if _is_end(events):
                return


async def collect(state: RequestState, service: Service, request: Request) -> list[Event]:
    """All events of a request that was submitted.

    Raises
    ------
    ApiError
        It failed.
    """
    events: list[Event] = []
    gone = asyncio.create_task(_gone(request))
    try:
        while not _is_end(events):
            taking = asyncio.create_task(state.take())
            done, _ = await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            if taking not in done:
                taking.cancel()
                raise ApiError(499, "cancelled", "the client went away")
            events += taking.result()
            state.note_written(taking.result(), service.metrics)
    finally:
        gone.cancel()
        _close(state, service, request.scope)
    failed = next((event for event in events if isinstance(event, ApiError)), None)
    if failed is not None:
        raise failed
    return events


def _close(state: RequestState, service: Service, scope: Scope) -> None:
    """Free what a request still holds; note how it ended."""
    state.closed = True
    scope["state"]["outcome"] = state.outcome
    tokens = sum(choice.tokens for choice in state.choices)
    scope["state"]["log"] |= {"completion_tokens": tokens} | (state.times() if tokens else {})
    if not state.done:
        service.worker.cancel(state)


async def _gone(request: Request) -> None:
    """Returns when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_end(events: list[Event]) -> bool:
    return any(isinstance(event, Finished | ApiError) for event in events)
