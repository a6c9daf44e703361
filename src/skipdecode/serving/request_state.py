"""One HTTP request on its way through the worker: its choices, and the tokens that come back.

The worker's thread fills in the choices; the event loop sees only updates, through `put` and `take`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from skipdecode.engine.sequence import PromptLayers
from skipdecode.generation.calls import CallForm
from skipdecode.generation.detokenizer import Piece
from skipdecode.generation.loop import Generated
from skipdecode.schedule import Schedule
from skipdecode.serving.errors import ApiError
from skipdecode.serving.metrics import Metrics

ChoiceFinish = Literal["stop", "length", "tool_calls"]
"""OpenAI's words; the engine tells an end token from a stop sequence, and both are a stop here."""


class Update(NamedTuple):
    """New tokens of a choice, and why it ends with them if it does; with the first, those of an echoed prompt."""

    choice: int
    pieces: list[Piece]
    finish_reason: ChoiceFinish | None
    prompt: tuple[Piece, ...] = ()

    @property
    def all_pieces(self) -> list[Piece]:
        """The prompt's tokens and the new ones."""
        return [*self.prompt, *self.pieces]

    @property
    def text(self) -> str:
        """Text of all tokens of the update."""
        return "".join(piece.text for piece in self.all_pieces)


def merge(updates: dict[int, Update], later: Update) -> None:
    """Add an update behind the updates of other choices, or to its choice's earlier tokens."""
    before = updates.pop(later.choice, None)
    if before is not None:
        later = later._replace(pieces=before.pieces + later.pieces, prompt=before.prompt + later.prompt)
    updates[later.choice] = later


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


@dataclass(eq=False)
class Choice(Generated):
    """One sequence of the batch; the worker's."""

    state: RequestState
    index: int  # in the response
    copy: int  # of its prompt: 0 to n - 1
    echo: bool = False  # whether the text begins with the prompt's
    empty: bool = False  # whether no new token is wanted: one is generated and dropped
    scores: tuple[Any, ...] = field(default=(), init=False)  # of the prompt, see `StepOutput.prompt`
    layers_run: int = field(default=0, init=False)  # for its tokens, all together
    kv_bytes: int = field(default=0, init=False)  # held after the last token
    kv_bytes_full: int = field(default=0, init=False)  # what full depth would hold then
    admitted: float | None = field(default=None, init=False)  # when it joined the batch


@dataclass(eq=False, kw_only=True)
class RequestState:
    """A request that was accepted. Times are on `time.perf_counter`'s clock.

    What is told of times is what a client can measure: they are taken in the event loop, when the text is written.
    """

    schedule: Schedule
    prompt_tokens: int  # of all prompts, each counted once
    trace: bool  # whether the client wants the layers of each token
    arrived: float
    deadline: float
    max_unread: int  # tokens that may wait for the reader
    calls: CallForm | None = None  # how the model calls tools, if there are any
    choices: list[Choice] = field(default_factory=list)
    cached_tokens: int = 0  # of the prompts, each counted once, that a prefix cache had
    depths: set[int] = field(default_factory=set)  # numbers of layers that ran for a token
    outcome: str = "cancelled"
    closed: bool = False  # nobody reads any more
    _first_written: float | None = None
    _written: dict[int, float] = field(default_factory=dict)  # when the last tokens of a choice were
    _unread: dict[int, Update] = field(default_factory=dict)  # by choice
    _error: ApiError | None = None
    _ended: int = 0  # choices whose last token was taken
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    # ------------------------------------------------------------------ event loop

    def put(self, events: Sequence[Update | ApiError]) -> bool:
        """Hand over what is new; False if the reader is too far behind, and the request ends here."""
        if self.closed:
            return True
        for event in events:
            if isinstance(event, ApiError):
                self._error = event
            else:
                merge(self._unread, event)
        self._wake.set()
        if sum(len(update.pieces) for update in self._unread.values()) <= self.max_unread:
            return True
        self.closed, self.outcome = True, "slow_reader"
        self._error = ApiError(400, "slow_reader", "the stream was read too slowly and is cut off")
        return False

    async def take(self) -> list[Update]:
        """Take what came since the last call, one update for each choice; waits for at least one.

        Raises ApiError: the request failed, and all that came before was taken.
        """
        await self._wake.wait()
        updates, self._unread = list(self._unread.values()), {}
        if self._error is None:
            self._wake.clear()
        elif not updates:
            raise self._error
        self._ended += sum(update.finish_reason is not None for update in updates)
        if self.finished:
            self.outcome = "ok"
        return updates

    @property
    def finished(self) -> bool:
        """Whether the last tokens of all choices were taken."""
        return self._ended == len(self.choices)

    def note_written(self, updates: Sequence[Update], metrics: Metrics) -> None:
        """Tokens are on their way to the client, or came for an answer that is sent whole."""
        now = time.perf_counter()
        if updates and self._first_written is None:
            self._first_written = now
            metrics.first_token_seconds.observe(now - self.arrived)
        for update in updates:
            before = self._written.get(update.choice)
            gaps = len(update.pieces) - (before is None)  # none before the first token
            for _ in range(gaps):
                metrics.inter_token_seconds.observe(0.0 if before is None else (now - before) / gaps)
            self._written[update.choice] = now

    def times(self) -> dict[str, Any]:
        """`first_token_s`, `decode_s` and `tokens_per_s` of `Summary`, if the last tokens are written now."""
        now = time.perf_counter()
        first = now if self._first_written is None else self._first_written
        later = sum(max(0, len(choice.tokens) - 1) for choice in self.choices)
        rate = round(later / (now - first), 3) if later > 0 and now > first else None
        return {
            "first_token_s": round(first - self.arrived, 6),
            "decode_s": round(now - first, 6),
            "tokens_per_s": rate,
        }

    def summary(self) -> Summary:
        """Summary of the request; its times end now."""
        num_layers = self.schedule.num_layers
        tokens = sum(len(choice.tokens) for choice in self.choices)
        held = sum(choice.kv_bytes for choice in self.choices)
        sets = None
        if self.trace:
            every = PromptLayers.of(self.schedule).held, *map(self.schedule.layers, range(self.schedule.seq_len))
            known = {len(layers): list(layers) for layers in every}
            sets = {str(depth): known[depth] for depth in sorted(self.depths)}
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
