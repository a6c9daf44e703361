"""Rows that run side by side, on one engine for each order in which schedules drop layers.

Schedules of one order share a batch. Engines of different orders share the model's weights and are stepped in turn.
Full depth fits any order and goes where most rows are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

from skipdecode.engine.fast import Engine
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.requests import StepOutput
from skipdecode.schedule import Schedule
from skipdecode.serving.request_state import Choice

__all__ = ["Group", "KvSize", "fast_groups"]


class KvSize(NamedTuple):
    """How keys and values are stored: in pages of so many tokens, each of so many bytes in one layer."""

    page_tokens: int
    page_bytes: int

    def of(self, tokens: int, layers: int) -> int:
        """Bytes of `tokens` tokens in each of `layers` layers."""
        return -(-tokens // self.page_tokens) * self.page_bytes * layers


class Group:
    """Choices whose rows run on one engine; without any the engine is dropped, which gives back its memory.

    Parameters
    ----------
    make : callable
        A new engine.
    order : tuple of int
        The order in which layers are dropped here.
    """

    def __init__(self, make: Callable[[], Engine], order: tuple[int, ...]) -> None:
        self._make = make
        self._order = order
        self._engine: Engine | None = None
        self._choices: dict[int, Choice] = {}  # by their numbers in the engine

    @property
    def rows(self) -> int:
        """Choices that were submitted and have not ended."""
        return len(self._choices)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are held."""
        return 0 if self._engine is None else self._engine.kv.bytes_held

    def takes(self, schedule: Schedule) -> bool:
        """Whether rows under this schedule can run here."""
        dropped = _dropped(schedule)
        return dropped == self._order[: len(dropped)]

    def submit(self, choice: Choice) -> None:
        """Take a choice; raises a SkipDecodeError if the model cannot run it."""
        if self._engine is None:
            self._engine = self._make()
        (number,) = self._engine.submit([choice.request], choice.state.schedule.schedule)
        self._choices[number] = choice

    def cancel(self, choice: Choice) -> None:
        """Drop a choice; its room is free before the next step. Others' choices are ignored."""
        for number in [number for number, row in self._choices.items() if row is choice]:
            del self._choices[number]
            if self._engine is not None:
                self._engine.cancel(number)
        self._drop_idle_engine()

    def step(self) -> list[tuple[Choice, StepOutput]]:
        """One token for each choice that is past its prompt. May raise anything: call `reset` then."""
        if self._engine is None:
            return []
        outputs = [(self._choices[out.request], out) for out in self._engine.step()]
        for _, out in outputs:
            if out.finish_reason is not None:
                del self._choices[out.request]
        self._drop_idle_engine()
        return outputs

    def reset(self) -> list[Choice]:
        """Drop all choices and what they hold; returns them."""
        choices = list(self._choices.values())
        self._choices.clear()
        self._drop_idle_engine()
        return choices

    def _drop_idle_engine(self) -> None:
        if not self._choices:
            self._engine = None


def fast_groups(model: FastModel, schedules: Iterable[Schedule], max_rows: int) -> list[Group]:
    """As few groups as take all of the schedules, with at most `max_rows` rows each, over the same model."""

    def maker(order: tuple[int, ...]) -> Callable[[], Engine]:
        # Stands for the order: each row brings its own schedule.
        schedule = Schedule(model.num_layers, order, (model.num_layers,), warmup_layers=0, name="group")

        def make() -> Engine:
            with warnings.catch_warnings():
                # Said once, when the model was opened.
                warnings.simplefilter("ignore", UserWarning)
                return Engine(model, schedule, max_rows=max_rows, join_below=1, in_order=True)

        return make

    orders: list[tuple[int, ...]] = []
    for dropped in sorted({_dropped(schedule) for schedule in schedules}, key=len, reverse=True):
        if not any(order[: len(dropped)] == dropped for order in orders):
            orders.append(dropped)
    return [Group(maker(order), order) for order in orders]


def _dropped(schedule: Schedule) -> tuple[int, ...]:
    """The layers that a schedule ever drops, in order."""
    return schedule.drop_order[: schedule.num_layers - schedule.budgets[-1]]
