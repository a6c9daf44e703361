"""One HTTP request on its way through the worker: its choices, and the events that come back.

The worker's thread fills in the choices; the event loop only sees events, through `put` and `take`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ConfigDict, with_config

from skipdecode.engine.depth import DepthOrder
from skipdecode.engine.requests import FinishReason, Request
from skipdecode.serving.catalog import NamedSchedule
from skipdecode.serving.detokenizer import Detokenizer, Piece
from skipdecode.serving.errors import ApiError

__all__ = ["Choice", "Event", "Failed", "Finished", "RequestState", "Summary", "Update"]


class Update(NamedTuple):
    """New tokens of a choice, and why it ends with them if it does."""

    choice: int
    pieces: list[Piece]
    finish_reason: FinishReason | None

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


class Finished(NamedTuple):
    """All choices have ended."""

    summary: Summary


class Failed(NamedTuple):
    """The request ends here."""

    error: ApiError


Event = Update | Finished | Failed


@dataclass(eq=False)
class Choice:
    """One row of the batch; the worker's.

    Parameters
    ----------
    state : RequestState
        Of the request it belongs to.
    index : int
        Number of the choice in the response.
    request : Request
        For the engine.
    text : Detokenizer
    tokens, layers_run : int
        New tokens so far, and the sum of the layers that ran for them.
    kv_bytes, kv_bytes_full : int
        Held after the last token, and what full depth would hold.
    last_time : float
        When the last token came.
    finish_reason : {"stop", "length"} or None
    """

    state: RequestState
    index: int
    request: Request
    text: Detokenizer
    tokens: int = 0
    layers_run: int = 0
    kv_bytes: int = 0
    kv_bytes_full: int = 0
    last_time: float = 0.0
    finish_reason: FinishReason | None = None


class RequestState:
    """A request that was accepted.

    Parameters
    ----------
    requests : list of Request
        One for each choice.
    prompt_tokens : int
        Of all prompts, each counted once.
    tokenizer : transformers tokenizer
        The worker's own.
    stops : tuple of str
        Stop strings.
    trace : bool
        Whether the client wants the layers of each token.
    arrived, deadline : float
        On `time.perf_counter`'s clock.
    max_unread : int
        Tokens that may wait for the reader.
    """

    def __init__(
        self,
        requests: list[Request],
        prompt_tokens: int,
        schedule: NamedSchedule,
        tokenizer: Any,
        stops: tuple[str, ...],
        *,
        trace: bool,
        arrived: float,
        deadline: float,
        max_unread: int,
    ) -> None:
        self.schedule = schedule
        self.prompt_tokens = prompt_tokens
        self.trace = trace
        self.deadline = deadline
        self.arrived = arrived
        self.choices = [Choice(self, i, r, Detokenizer(tokenizer, stops)) for i, r in enumerate(requests)]
        self.first_token: float | None = None
        self.budgets: set[int] = set()
        self.outcome = "cancelled"
        self.closed = False
        self._max_unread = max_unread
        self._unread = 0
        self._events: list[Event] = []
        self._wake = asyncio.Event()

    # ------------------------------------------------------------------ event loop

    def put(self, events: list[Event]) -> bool:
        """Hand over events; False if the reader is too far behind, and nothing more will be taken."""
        if self.closed:
            return True
        self._unread += sum(len(event.pieces) for event in events if isinstance(event, Update))
        self._events += events
        self._wake.set()
        return self._unread <= self._max_unread

    async def take(self) -> list[Event]:
        """All events since the last call, at least one."""
        await self._wake.wait()
        self._wake.clear()
        events, self._events = self._events, []
        self._unread = 0
        return events

    # ------------------------------------------------------------------ worker

    @property
    def done(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finish_reason is not None for choice in self.choices)

    def summary(self, num_layers: int) -> Summary:
        """Of the finished request."""
        tokens = sum(choice.tokens for choice in self.choices)
        first = self.arrived if self.first_token is None else self.first_token
        decode = max(choice.last_time for choice in self.choices) - first
        later = tokens - len(self.choices)
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
            first_token_s=round(first - self.arrived, 6),
            decode_s=round(decode, 6),
            tokens_per_s=round(later / decode, 3) if later > 0 and decode > 0 else None,
            layer_sets=sets,
        )
