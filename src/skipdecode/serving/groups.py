"""Rows that run side by side: an engine for each order in which schedules drop layers, or one for all through gates.

Schedules of one order share a batch. Engines of different orders share the model's weights and are stepped in turn.
Full depth fits any order and goes where most rows are. An engine without rows gives back its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from skipdecode.engine.base import Engine
from skipdecode.engine.opening import EngineSource
from skipdecode.engine.requests import Request, StepOutput
from skipdecode.schedule import Schedule

__all__ = ["Group", "KvSize", "group_for", "make_groups"]

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


class Group(Generic[T]):
    """Rows on one engine, which is made for the first of them and dropped after the last.

    A row is any object of the caller's; it is used as a key.

    Parameters
    ----------
    make : callable
        A new engine.
    order : tuple of int or None
        The order in which layers are dropped here; None: any schedule runs here.
    """

    def __init__(self, make: Callable[[], Engine], order: tuple[int, ...] | None) -> None:
        self._make = make
        self._order = order
        self._engine: Engine | None = None
        self._rows: dict[int, T] = {}
        self._numbers: dict[T, int] = {}

    @property
    def rows(self) -> int:
        """Rows that were submitted and have not ended."""
        return len(self._rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are held."""
        return 0 if self._engine is None else self._engine.kv_bytes

    def takes(self, schedule: Schedule) -> bool:
        """Whether rows under this schedule can run here."""
        dropped = schedule.dropped
        return self._order is None or dropped == self._order[: len(dropped)]

    def submit(self, row: T, request: Request, schedule: Schedule) -> None:
        """Take a row; raises a SkipDecodeError if the model cannot run it."""
        if self._engine is None:
            self._engine = self._make()
        number = self._engine.submit([request], schedule)[0]
        self._rows[number] = row
        self._numbers[row] = number

    def cancel(self, row: T) -> None:
        """Drop a row; its room is free before the next step. Unknown rows are ignored."""
        number = self._numbers.pop(row, None)
        if number is not None and self._engine is not None:
            del self._rows[number]
            self._engine.cancel(number)
            self._rest()

    def step(self) -> list[tuple[T, StepOutput]]:
        """One token for each row that is past its prompt. May raise anything: call `reset` then."""
        if self._engine is None:
            return []
        outputs = [(self._rows[out.request], out) for out in self._engine.step()]
        for row, out in outputs:
            if out.finish_reason is not None:
                del self._rows[out.request], self._numbers[row]
        self._rest()
        return outputs

    def reset(self) -> list[T]:
        """Drop all rows and what they hold; returns them."""
        rows = list(self._rows.values())
        self._rows.clear()
        self._numbers.clear()
        self._rest()
        return rows

    def _rest(self) -> None:
        if not self._rows and self._engine is not None:
            self._engine.close()
            self._engine = None


def make_groups(source: EngineSource, schedules: Iterable[Schedule], max_rows: int) -> list[Group[T]]:
    """As few groups as take all of the schedules, of at most `max_rows` rows each."""

    def maker(order: tuple[int, ...]) -> Callable[[], Engine]:
        # Stands for the order: each row brings its own schedule.
        stand_in = Schedule(source.num_layers, order, (source.num_layers,), warmup_layers=0, name="group")

        def make() -> Engine:
            with warnings.catch_warnings():
                # Said once, when the model was opened.
                warnings.simplefilter("ignore", UserWarning)
                return source.engine(stand_in, max_rows=max_rows, join_below=1, in_order=True)

        return make

    if source.fast is None:
        return [Group(maker(()), None)]
    orders: list[tuple[int, ...]] = []
    for dropped in sorted({schedule.dropped for schedule in schedules}, key=len, reverse=True):
        if not any(order[: len(dropped)] == dropped for order in orders):
            orders.append(dropped)
    return [Group(maker(order), order) for order in orders]


def group_for(groups: list[Group[T]], schedule: Schedule) -> Group[T]:
    """The group with most rows among those that take the schedule."""
    return max((group for group in groups if group.takes(schedule)), key=lambda group: group.rows)
