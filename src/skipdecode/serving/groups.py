"""Rows that run side by side, on one engine for each order in which schedules drop layers.

Schedules of one order share a batch. Engines of different orders share the model's weights and are stepped in turn.
Full depth fits any order and goes where most rows are. An engine without rows gives back its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

from skipdecode.engine.fast import Engine
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.requests import Request, StepOutput
from skipdecode.schedule import Schedule

__all__ = ["EngineLane", "KvSize", "Lane", "fast_lanes", "lane_for"]

T = TypeVar("T")


class KvSize(NamedTuple):
    """How keys and values are stored.

    Parameters
    ----------
    page_tokens : int
        Tokens of a page.
    page_bytes : int
        Bytes of a page of one layer.
    """

    page_tokens: int
    page_bytes: int

    def of(self, tokens: int, layers: int) -> int:
        """Bytes of `tokens` tokens in each of `layers` layers."""
        return -(-tokens // self.page_tokens) * self.page_bytes * layers


class Lane(Protocol[T]):
    """Steps rows together. A row is any object of the caller's; it is used as a key."""

    @property
    def rows(self) -> int:
        """Rows that were submitted and have not ended."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are held."""

    def takes(self, schedule: Schedule) -> bool:
        """Whether rows under this schedule can run here."""

    def submit(self, row: T, request: Request, schedule: Schedule) -> None:
        """Take a row; raises a SkipDecodeError if the model cannot run it."""

    def cancel(self, row: T) -> None:
        """Drop a row; its room is free before the next step. Unknown rows are ignored."""

    def step(self) -> list[tuple[T, StepOutput]]:
        """One token for each row that is past its prompt. May raise anything: call `reset` then."""

    def reset(self) -> list[T]:
        """Drop all rows and what they hold; returns them."""


class EngineLane(Generic[T]):
    """A lane on `skipdecode.engine.Engine`.

    Parameters
    ----------
    make : callable
        A new engine under a given schedule.
    order : tuple of int
        The order in which layers are dropped here.
    """

    def __init__(self, make: Callable[[Schedule], Engine], num_layers: int, order: tuple[int, ...]) -> None:
        self.order = order
        self._make = make
        # Stands for the order: each row brings its own schedule.
        self._schedule = Schedule(num_layers, order, (num_layers,), warmup_layers=0, name="lane")
        self._engine: Engine | None = None
        self._rows: dict[int, T] = {}
        self._numbers: dict[T, int] = {}

    @property
    def rows(self) -> int:
        """See `Lane`."""
        return len(self._rows)

    @property
    def kv_bytes(self) -> int:
        """See `Lane`."""
        return 0 if self._engine is None else self._engine.kv.bytes_held

    def takes(self, schedule: Schedule) -> bool:
        """See `Lane`."""
        dropped = _dropped(schedule)
        return dropped == self.order[: len(dropped)]

    def submit(self, row: T, request: Request, schedule: Schedule) -> None:
        """See `Lane`."""
        if self._engine is None:
            self._engine = self._make(self._schedule)
        number = self._engine.submit([request], schedule)[0]
        self._rows[number] = row
        self._numbers[row] = number

    def cancel(self, row: T) -> None:
        """See `Lane`."""
        number = self._numbers.pop(row, None)
        if number is not None and self._engine is not None:
            del self._rows[number]
            self._engine.cancel(number)
            self._rest()

    def step(self) -> list[tuple[T, StepOutput]]:
        """See `Lane`."""
        if self._engine is None:
            return []
        outputs = [(self._rows[out.request], out) for out in self._engine.step()]
        for row, out in outputs:
            if out.finish_reason is not None:
                del self._rows[out.request], self._numbers[row]
        self._rest()
        return outputs

    def reset(self) -> list[T]:
        """See `Lane`."""
        rows = list(self._rows.values())
        self._rows.clear()
        self._numbers.clear()
        self._engine = None
        return rows

    def _rest(self) -> None:
        if not self._rows:
            self._engine = None


def fast_lanes(model: FastModel, schedules: Iterable[Schedule], max_rows: int) -> list[EngineLane[T]]:
    """As few lanes as take all of the schedules.

    Parameters
    ----------
    model : FastModel
        Shared by all of them.
    schedules : iterable of Schedule
    max_rows : int
        Most rows of a lane.
    """

    def make(schedule: Schedule) -> Engine:
        with warnings.catch_warnings():
            # Said once, when the model was opened.
            warnings.simplefilter("ignore", UserWarning)
            return Engine(model, schedule, max_rows=max_rows, join_below=1, in_order=True)

    orders: list[tuple[int, ...]] = []
    for dropped in sorted({_dropped(schedule) for schedule in schedules}, key=len, reverse=True):
        if not any(order[: len(dropped)] == dropped for order in orders):
            orders.append(dropped)
    return [EngineLane(make, model.num_layers, order) for order in orders]


def lane_for(lanes: list[Lane[T]], schedule: Schedule) -> Lane[T]:
    """The lane with most rows among those that take the schedule."""
    return max((lane for lane in lanes if lane.takes(schedule)), key=lambda lane: lane.rows)


def _dropped(schedule: Schedule) -> tuple[int, ...]:
    """The layers that a schedule ever drops, in order."""
    return schedule.drop_order[: schedule.num_layers - schedule.budgets[-1]]
