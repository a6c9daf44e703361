"""Rows that run side by side: an engine for each order in which schedules drop layers, or one for all through gates.

Schedules of one order share a batch. Engines of different orders share the model's weights and are stepped in turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial

from skipdecode.engine.base import Engine
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import StepOutput
from skipdecode.schedule import Schedule
from skipdecode.serving.request_state import Choice

_PROMPT_TOKENS = 128
"""Of one forward: a row's next token waits for it. The kernels are as fast with 512, within 2% (docs/LOG.md)."""


class Group:
    """Choices on one engine, which is made for the first of them and dropped after the last, unless it keeps prompts.

    Parameters
    ----------
    make : callable
        Makes a new engine.
    order : tuple of int or None
        The order in which layers are dropped here; None: any schedule runs here.
    """

    def __init__(self, make: Callable[[], Engine], order: tuple[int, ...] | None) -> None:
        self._make = make
        self._order = order
        self._engine: Engine | None = None
        self._choices: dict[int, Choice] = {}  # by their numbers in the engine

    @property
    def choices(self) -> list[Choice]:
        """Those that were submitted and not removed."""
        return list(self._choices.values())

    @property
    def rows(self) -> int:
        """How many those are."""
        return len(self._choices)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are held."""
        return 0 if self._engine is None else self._engine.kv_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes that are kept of prompts for those to come."""
        return 0 if self._engine is None else self._engine.cached_bytes

    def takes(self, schedule: Schedule) -> bool:
        """Whether rows under this schedule can run here."""
        dropped = schedule.dropped
        return self._order is None or dropped == self._order[: len(dropped)]

    def submit(self, choice: Choice) -> None:
        """Take a choice; raises a SkipDecodeError if the model cannot run it."""
        if self._engine is None:
            self._engine = self._make()
        (choice.number,) = self._engine.submit([choice.request], choice.state.schedule)
        self._choices[choice.number] = choice

    def holds(self, choice: Choice) -> bool:
        """Whether a choice was submitted here and has not been removed."""
        return self._choices.get(choice.number) is choice

    def remove(self, choice: Choice) -> None:
        """Let a choice go that is held here; what it has not given back is free before the next step."""
        del self._choices[choice.number]
        if self._engine is not None:
            self._engine.cancel(choice.number)
        if not self._choices and not self.cached_bytes:
            self.drop_engine()

    def step(self) -> list[tuple[Choice, StepOutput]]:
        """A forward of the engine, and the tokens that it gave. May raise anything: call `drop_engine` then."""
        if self._engine is None:
            return []
        return [(self._choices[out.request], out) for out in self._engine.step()]

    def take_drafts(self) -> dict[str, int]:
        """Tokens that were drafted, accepted and verified since the last call, by their names in `EngineStats`."""
        counts = {}
        if self._engine is not None:
            for name in ("drafted_tokens", "accepted_tokens", "verified_tokens"):
                counts[name] = getattr(self._engine.stats, name)
                setattr(self._engine.stats, name, 0)
        return counts

    def drop_engine(self) -> None:
        """Close the engine; what runs on it is lost."""
        engine, self._engine = self._engine, None
        # It may be broken: what it can still give back, it gives back.
        with contextlib.suppress(Exception):
            if engine is not None:
                engine.close()


def make_groups(
    source: Backend, schedules: Iterable[Schedule], max_rows: int, prefix_cache: bool = True
) -> list[Group]:
    """As few groups as take all of the schedules, of at most `max_rows` rows each; each keeps prompts of its own."""
    make = partial(
        source.for_order,
        max_rows=max_rows,
        refill_below=1,
        in_order=True,
        prefix_cache=prefix_cache,
        prompt_tokens=_PROMPT_TOKENS,
    )
    if source.fast is None:
        return [Group(partial(make, ()), None)]
    orders: list[tuple[int, ...]] = []
    for dropped in sorted({schedule.dropped for schedule in schedules}, key=len, reverse=True):
        if not any(order[: len(dropped)] == dropped for order in orders):
            orders.append(dropped)
    return [Group(partial(make, order), order) for order in orders]
