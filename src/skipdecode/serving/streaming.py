"""A ticket's events on their way to the client: as a stream, or collected. Frees the rows when the client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from skipdecode.serving.errors import ApiError
from skipdecode.serving.replies import Reply, sse
from skipdecode.serving.request_state import Event, Failed, Finished, Ticket
from skipdecode.serving.service import Service

__all__ = ["TicketStream", "collect"]


class TicketStream(StreamingResponse):
    """Server-sent events of a ticket.

    Parameters
    ----------
    ticket : Ticket
        Submitted.
    reply : Reply
    service : Service
    """

    def __init__(self, ticket: Ticket, reply: Reply, service: Service) -> None:
        super().__init__(self._events(), media_type="text/event-stream")
        # For proxies that would collect the stream.
        self.headers["X-Accel-Buffering"] = "no"
        self._ticket = ticket
        self._reply = reply
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""

        async def in_time(message: Message) -> None:
            async with asyncio.timeout(self._service.limits.stall_seconds):
                await send(message)

        try:
            await super().__call__(scope, receive, in_time)
        except* TimeoutError:
            self._ticket.outcome = "slow_reader"
        finally:
            close(self._ticket, self._service, scope["state"])

    async def _events(self) -> AsyncIterator[bytes]:
        yield self._reply.opening()
        while True:
            events = await self._ticket.take()
            chunks = self._reply.chunks(events)
            if self._ticket.closed:
                error = ApiError(400, "slow_reader", "the stream was read too slowly and is cut off")
                yield chunks + sse(error.body())
                return
            if chunks:
                yield chunks
            if _is_end(events):
                return


async def collect(ticket: Ticket, service: Service, request: Request) -> list[Event]:
    """All events of a ticket.

    Raises
    ------
    ApiError
        The ticket failed.
    """
    events: list[Event] = []
    gone = asyncio.create_task(_gone(request))
    try:
        while not _is_end(events):
            taking = asyncio.create_task(ticket.take())
            done, _ = await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            if taking not in done:
                taking.cancel()
                raise ApiError(499, "cancelled", "the client went away")
            events += taking.result()
    finally:
        gone.cancel()
        close(ticket, service, request.scope["state"])
    failed = next((event.error for event in events if isinstance(event, Failed)), None)
    if failed is not None:
        raise failed
    return events


def close(ticket: Ticket, service: Service, state: dict[str, Any]) -> None:
    """Free what a ticket still holds; note how it ended."""
    ticket.closed = True
    state["outcome"] = ticket.outcome
    state["log"]["completion_tokens"] = sum(choice.tokens for choice in ticket.choices)
    if not ticket.done:
        service.worker.cancel(ticket)


async def _gone(request: Request) -> None:
    """Returns when the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _is_end(events: list[Event]) -> bool:
    return any(isinstance(event, Finished | Failed) for event in events)
