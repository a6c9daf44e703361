"""One HTTP request on its way through the worker: its choices, and the events that come back.

The worker's thread fills in the choices; the event loop only sees events, through `put` and `take`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict, with_config

from skipdecode.data.detokenizer import Detokenizer, Piece
from skipdecode.engine.depth import DepthOrder
from skipdecode.engine.requests import Request
from skipdecode.serving.catalog import NamedSchedule
from skipdecode.serving.errors import ApiError
from skipdecode.serving.metrics import Metrics

__all__ = ["Choice", "ChoiceFinish", "Event", "Finished", "RequestState", "Summary", "Update"]


ChoiceFinish = Literal["stop", "length"]
"""OpenAI's words; the engine tells an end token from a stop sequence, and both are a stop here."""


class Update(NamedTuple):
    """New tokens of a choice, and why it ends with them if it does."""

    choice: int
    pieces: list[Piece]
    finish_reason: ChoiceFinish | None

    @property
    def text(self) -> str:
        """Of the tokens together."""
        return "".join(piece.text for piece in self.pieces)


@with_config(ConfigDict(extra="forbid"))  # for the description of the interface
@dataclass(frozen=True)
class Summary:
    """A whole request, in the terms of docs/serve.md."""

    schedule: str
    prompt_tokens: int
    completion_tokens: int
    layers_run: int
    layers_full: int
    kv_bytes: int
    kv_bytes_saved: int
    first_token_s: float
    decode_s: float
    tokens_per_s: float | None
    layer_sets: dict[str, list[int]] | None


class Finished:
    """All choices have ended: nothing comes after this."""


Event = Update | Finished | ApiError
"""The last one says that the request finished, or is the error that ended it."""


@dataclass(eq=False)
class Choice:
    """One row of the batch; the worker's."""

    state: RequestState
    index: int  # in the response
    copy: int  # of its prompt: 0 to n - 1
    request: Request
    detokenizer: Detokenizer
    number: int = -1  # in its engine
    tokens: int = 0  # new ones so far
    layers_run: int = 0  # for them, all together
    kv_bytes: int = 0  # held after the last token
    kv_bytes_full: int = 0  # what full depth would hold
    last_time: float = 0.0  # when the last token came
    finish_reason: ChoiceFinish | None = None


@dataclass(eq=False, kw_only=True)
class RequestState:
    """A request that was accepted. Times are on `time.perf_counter`'s clock.

    What is told of times is what a client can measure: they are taken in the event loop, when the text is written.
    """

    schedule: NamedSchedule
    prompt_tokens: int  # of all prompts, each counted once
    trace: bool  # whether the client wants the layers of each token
    arrived: float
    deadline: float
    max_unread: int  # tokens that may wait for the reader
    choices: list[Choice] = field(default_factory=list)
    first_token: float | None = None  # when the worker had it
    cached_tokens: int = 0  # of the prompts, each counted once, that a prefix cache had
    budgets: set[int] = field(default_factory=set)  # numbers of layers that ran for a token
    outcome: str = "cancelled"
    closed: bool = False  # nobody reads any more
    _first_written: float | None = None
    _written: dict[int, float] = field(default_factory=dict)  # when the last tokens of a choice were
    _unread: int = 0
    _events: list[Event] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    # ------------------------------------------------------------------ event loop

    def put(self, events: list[Event]) -> bool:
        """Hand over events; False if the reader is too far behind, and nothing more will be taken."""
        if self.closed:
            return True
        self._unread += sum(len(event.pieces) for event in events if isinstance(event, Update))
        self._events += events
        self._wake.set()
        return self._unread <= self.max_unread

    async def take(self) -> list[Event]:
        """All events since the last call, at least one."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, []
        self._unread = 0
        return events

    def note_written(self, events: Iterable[Event], metrics: Metrics) -> None:
        """Tokens are on their way to the client, or came for an answer that is sent whole."""
        now = time.perf_counter()
        updates = [event for event in events if isinstance(event, Update)]
        if updates and self._first_written is None:
            self._first_written = now
            metrics.first_token_seconds.observe(now - self.arrived)
        for update in updates:
            if update.choice in self._written:
                gap = (now - self._written[update.choice]) / max(1, len(update.pieces))
                for _ in update.pieces:
                    metrics.inter_token_seconds.observe(gap)
            self._written[update.choice] = now

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def times(self) -> dict[str, Any]:
        """`first_token_s`, `decode_s` and `tokens_per_s` of `Summary`, if the last tokens are written now."""
        now = time.perf_counter()
        first = now if self._first_written is None else self._first_written
        later = sum(max(0, choice.tokens - 1) for choice in self.choices)
        rate = round(later / (now - first), 3) if later > 0 and now > first else None
        return {
            "first_token_s": round(first - self.arrived, 6),
            "decode_s": round(now - first, 6),
            "tokens_per_s": rate,
        }

    def summary(self) -> Summary:
        """Of the finished request, written now."""
        num_layers = self.schedule.schedule.num_layers
        tokens = sum(choice.tokens for choice in self.choices)
        held = sum(choice.kv_bytes for choice in self.choices)
        sets = None
        if self.trace:
            order = DepthOrder(self.schedule.schedule)
            sets = {str(budget): list(order.layers(budget)) for budget in sorted(self.budgets)}
        return Summary(
            schedule=self.schedule.name,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=tokens,
            layers_run=sum(choice.layers_run for choice in self.choices),
            layers_full=tokens * num_layers,
            kv_bytes=held,
            kv_bytes_saved=sum(choice.kv_bytes_full for choice in self.choices) - held,
            layer_sets=sets,
            **self.times(),
        )
