"""The stream of one HTTP request: its choices on their way through the worker, and the tokens that come back.

The worker's thread fills in the choices; the event loop sees only events, through `put` and `events`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from skipdecode.engine.requests import NextToken
from skipdecode.engine.sequence import PromptLayers
from skipdecode.generation.detokenizer import Detokenizer, Piece, TokenTexts
from skipdecode.generation.loop import Generated
from skipdecode.serving.errors import ApiError
from skipdecode.serving.metrics import Metrics
from skipdecode.serving.preprocessing import Sequences
from skipdecode.serving.served_model import ServedModel


class Event(NamedTuple):
    """New tokens of a choice, and why it ends with them if it does; with the first, those of an echoed prompt."""

    choice: int
    pieces: list[Piece]
    finish_reason: Literal["stop", "length", "tool_calls"] | None  # OpenAI's words: an end token is a stop too
    prompt: tuple[Piece, ...] = ()

    @property
    def text(self) -> str:
        """Text of all tokens together."""
        return "".join(piece.text for piece in (*self.prompt, *self.pieces))


def merge(events: dict[int, Event], later: Event) -> None:
    """Add an event to those of other choices, behind them, or to its choice's earlier tokens."""
    earlier = events.pop(later.choice, None)
    if earlier is not None:
        later = later._replace(pieces=earlier.pieces + later.pieces, prompt=earlier.prompt + later.prompt)
    events[later.choice] = later


@dataclass(eq=False)
class Choice(Generated):
    """One sequence of the batch; the worker's."""

    stream: StreamState
    index: int  # in the response
    scores: tuple[NextToken, ...] = field(default=(), init=False)  # of the prompt's tokens, see `StepOutput.prompt`
    layers: list[int] = field(default_factory=list, init=False)  # number of layers that ran for each token
    admitted: float | None = field(default=None, init=False)  # when it joined the batch

    @property
    def layers_run(self) -> int:
        """Layers that ran for the tokens of the answer, all together."""
        return sum(self.layers[: len(self.tokens)])

    @property
    def tokens_fed(self) -> int:
        """Tokens whose keys and values are held at the end: the last new token is not fed back."""
        return len(self.request.prompt) + len(self.layers) - 1


class StreamState:
    """The state of a request that was accepted. Times are on `time.perf_counter`'s clock.

    Times for clients are what they can measure: they are taken in the event loop, when the text is written.

    Attributes `cached_tokens`: tokens of the prompts, each counted once, that a prefix cache had. `closed`: whether
    nobody reads any more.
    """

    def __init__(self, sequences: Sequences, model: ServedModel, texts: TokenTexts, arrived: float) -> None:
        self.sequences = sequences
        self.schedule = sequences.schedule
        self.choices = [
            Choice(request, Detokenizer(texts, sequences.stops, sequences.stop_tokens), self, index)
            for index, request in enumerate(sequences.requests)
        ]
        self.deadline = arrived + model.limits.max_seconds
        self.cached_tokens = 0
        self.outcome = "cancelled"
        self.closed = False
        self._arrived = arrived
        self._layout = model.layout
        self._max_unread = model.limits.max_unread_tokens
        self._first_written: float | None = None
        self._tokens_at_first = 0  # which were written at that moment
        self._written: dict[int, float] = {}  # when the last tokens of a choice were
        self._unread: dict[int, Event] = {}  # by choice
        self._error: ApiError | None = None
        self._ended = 0  # choices whose last token was taken
        self._wake = asyncio.Event()

    # ------------------------------------------------------------------ event loop

    def put(self, events: Sequence[Event | ApiError]) -> bool:
        """Hand over what is new; False if the reader is too far behind, and the request ends here."""
        if self.closed:
            return True
        for event in events:
            if isinstance(event, ApiError):
                self._error = event
            else:
                merge(self._unread, event)
        self._wake.set()
        if sum(len(event.pieces) for event in self._unread.values()) <= self._max_unread:
            return True
        self.closed, self.outcome = True, "slow_reader"
        self._error = ApiError(400, "slow_reader", "the stream was read too slowly and is cut off")
        return False

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield what came since the last item, one event for each choice, until all choices have ended.

        Raises ApiError: the request failed, and all that came before was taken.
        """
        while not self.finished:
            await self._wake.wait()
            events, self._unread = list(self._unread.values()), {}
            if self._error is None:
                self._wake.clear()
            elif not events:
                raise self._error
            self._ended += sum(event.finish_reason is not None for event in events)
            if self.finished:
                self.outcome = "ok"
            yield events

    @property
    def finished(self) -> bool:
        """Whether the last tokens of all choices were taken."""
        return self._ended == len(self.choices)

    def note_written(self, events: Sequence[Event], metrics: Metrics) -> None:
        """Note that tokens are on their way to the client, or came for an answer that is sent whole."""
        now = time.perf_counter()
        if events and self._first_written is None:
            self._first_written, self._tokens_at_first = now, sum(len(event.pieces) for event in events)
            metrics.first_token_seconds.observe(now - self._arrived)
        for event in events:
            before = self._written.get(event.choice)
            gaps = len(event.pieces) - (before is None)  # none before the first token
            for _ in range(gaps):
                metrics.inter_token_seconds.observe(0.0 if before is None else (now - before) / gaps)
            self._written[event.choice] = now

    @property
    def completion_tokens(self) -> int:
        """New tokens of all choices so far."""
        return sum(len(choice.tokens) for choice in self.choices)

    def times(self) -> dict[str, object]:
        """`first_token_s`, `decode_s` and `tokens_per_s` of `summary`, if the last tokens are written now."""
        now = time.perf_counter()
        first = now if self._first_written is None else self._first_written
        later = self.completion_tokens - self._tokens_at_first
        rate = round(later / (now - first), 3) if later > 0 and now > first else None
        return {
            "first_token_s": round(first - self._arrived, 6),
            "decode_s": round(now - first, 6),
            "tokens_per_s": rate,
        }

    def summary(self) -> dict[str, object]:
        """The finished request, in the terms of docs/serve.md; its times end now."""
        num_layers = self.schedule.num_layers
        held = sum(self._layout.bytes(choice.tokens_fed, choice.layers[-1]) for choice in self.choices)
        held_at_full_depth = sum(self._layout.bytes(choice.tokens_fed, num_layers) for choice in self.choices)
        return {
            "schedule": self.schedule.name,
            "prompt_tokens": self.sequences.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "layers_run": sum(choice.layers_run for choice in self.choices),
            "layers_full": self.completion_tokens * num_layers,
            "kv_bytes": held,
            "kv_bytes_saved": held_at_full_depth - held,
            **self.times(),
            "layer_sets": self._layer_sets() if self.sequences.trace else None,
        }

    def _layer_sets(self) -> dict[str, list[int]]:
        """The layers of each number of layers that ran for a token."""
        schedule = self.schedule
        sets = PromptLayers.of(schedule).held, *map(schedule.layers, range(schedule.seq_len))
        by_depth = {len(layers): list(layers) for layers in sets}
        return {str(depth): by_depth[depth] for depth in sorted({n for c in self.choices for n in c.layers})}
