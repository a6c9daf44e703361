"""Events on their way from the worker's thread to the event loop: gathered over a step, handed over in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skipdecode.serving.request_state import Event, Ticket

__all__ = ["Outbox"]


class Outbox:
    """The worker's side of all tickets' events.

    Parameters
    ----------
    drop : callable
        Called in the event loop with a ticket whose reader is too far behind.
    """

    def __init__(self, drop: Callable[[Ticket], None]) -> None:
        self._drop = drop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._events: dict[Ticket, list[Event]] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Where events go."""
        self._loop = loop

    def add(self, ticket: Ticket, event: Event) -> None:
        """Put in an event of a ticket."""
        self._events.setdefault(ticket, []).append(event)

    def send(self) -> None:
        """Hand over what was put in."""
        if self._events and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, self._events)
        self._events = {}

    def _put(self, events: dict[Ticket, list[Event]]) -> None:
        for ticket, new in events.items():
            if not ticket.put(new) and not ticket.closed:
                ticket.closed = True
                ticket.outcome = "slow_reader"
                self._drop(ticket)
