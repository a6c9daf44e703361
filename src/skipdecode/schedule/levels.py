"""Budget curves with few levels, for engines that prepare something (a CUDA graph) for each. Pure Python.

Budgets are only rounded up, to the first budget of a stretch of positions: no position loses a layer, budgets still
never rise, and position 0 (with it a prompt's depth under ``prompt="max_exit"``) stays as it is. What is lost is a part
of the layers saved; the stretches are those that lose least (dynamic programming over the curve's plateaus).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import require_positive

__all__ = ["Levelled", "fewest_levels", "with_levels"]


class Levelled(NamedTuple):
    """A schedule with few distinct budgets.

    Parameters
    ----------
    schedule : Schedule
        Runs at every position at least the layers of the one it was made from.
    lost : float
        Share of that one's saving (layers left out, summed over decode steps) that it does not have, 0 to 1.
    """

    schedule: Schedule
    lost: float


def with_levels(schedule: Schedule, levels: int, new_tokens: Sequence[int] | None = None) -> Levelled:
    """The schedule of at most `levels` distinct budgets that loses least.

    Parameters
    ----------
    schedule : Schedule
    levels : int
        1 or more.
    new_tokens : sequence of int, optional
        New tokens of each row, as of a sample of a job's outputs: a row of n has n - 1 decode steps. Default: one row
        that takes every listed position once.

    Raises
    ------
    ScheduleError
        If a number is below 1, or there are no rows.
    """
    require_positive("levels", levels)
    curve = _Curve(schedule, new_tokens)
    return curve.levelled(min(levels, curve.plateaus))


def fewest_levels(schedule: Schedule, *, most_lost: float = 0.02, new_tokens: Sequence[int] | None = None) -> Levelled:
    """The schedule of fewest distinct budgets that loses a share of at most `most_lost`; see `with_levels`."""
    if not 0 <= most_lost <= 1:
        raise ScheduleError(f"most_lost={most_lost!r} is not accepted: give a share from 0 to 1")
    curve = _Curve(schedule, new_tokens)
    # All plateaus lose nothing, so one of these fits.
    return next(found for n in range(1, curve.plateaus + 1) if (found := curve.levelled(n)).lost <= most_lost)


class _Curve:
    """A schedule's plateaus, the decode steps on each, and the best ways to merge them."""

    def __init__(self, schedule: Schedule, new_tokens: Sequence[int] | None) -> None:
        rows = (schedule.seq_len + 1,) if new_tokens is None else tuple(new_tokens)
        if not rows:
            raise ScheduleError("new_tokens is empty: give the new tokens of at least one row")
        for count in rows:
            require_positive("new_tokens", count)
        self._schedule = schedule
        self._values = sorted(set(schedule.budgets), reverse=True)
        starts = [schedule.budgets.index(value) for value in self._values]
        # Steps at or after each plateau's start, then on it alone; the last plateau goes on for ever.
        after = [sum(max(0, count - 1 - start) for count in rows) for start in starts] + [0]
        steps = [a - b for a, b in pairwise(after)]
        self._steps = [0, *accumulate(steps)]
        self._layers = [0, *accumulate(n * value for n, value in zip(steps, self._values, strict=True))]
        # _best[k][j]: least added layers of the first j plateaus on k + 1 levels, and where the last level begins.
        self._best = [[(self._added(0, j), 0) for j in range(self.plateaus + 1)]]

    @property
    def plateaus(self) -> int:
        return len(self._values)

    def levelled(self, levels: int) -> Levelled:
        """The best of exactly `levels` levels; no fewer than one, no more than there are plateaus."""
        while len(self._best) < levels:
            before = self._best[-1]
            self._best.append(
                [
                    min(((before[i][0] + self._added(i, j), i) for i in range(1, j)), default=before[j])
                    for j in range(self.plateaus + 1)
                ]
            )
        value_of: dict[int, int] = {}
        end = self.plateaus
        for k in reversed(range(levels)):
            begin = self._best[k][end][1]
            value_of |= dict.fromkeys(self._values[begin:end], self._values[begin])
            end = begin
        added, saved = self._best[levels - 1][-1][0], self._schedule.num_layers * self._steps[-1] - self._layers[-1]
        budgets = tuple(value_of[budget] for budget in self._schedule.budgets)
        return Levelled(replace(self._schedule, budgets=budgets), added / saved if saved else 0.0)

    def _added(self, begin: int, end: int) -> int:
        """Layers that plateaus `begin` to `end` - 1 run more, all steps together, at the first one's budget."""
        if begin == end:
            return 0
        steps, layers = self._steps[end] - self._steps[begin], self._layers[end] - self._layers[begin]
        return steps * self._values[begin] - layers
