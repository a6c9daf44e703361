"""Losses by generation position and budget, and the budget curve of least loss within a cost limit. Pure Python.

A measured loss is that at a position when *all* positions run one budget. A curve gives each position its own, so the
sum over positions is a prediction: exact for flat curves, and otherwise as good as a token's loss depends on its own
depth more than on that of the tokens before it.

Losses and costs of the buckets add up, so the best way on depends on the past only through the cost so far and the last
budget. For each last budget the partial curves that no other one beats in both cost and loss are kept (a Pareto front),
so the result is the optimum, not the relaxation that a Lagrange multiplier finds, which misses curves between the
corners of the trade-off. Fronts of more than `MOST_POINTS` points are thinned by cost; costs of those kept stay exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from skipdecode.errors import ScheduleError

__all__ = ["SLACK", "LossTable", "best_curve", "best_flat", "bucket_starts"]

MOST_POINTS = 4000
SLACK = 1 + 1e-12
# (cost, loss, chain of budgets back to the first bucket)
_Point = tuple[float, float, Any]


@dataclass(frozen=True)
class LossTable:
    """Losses under one drop order: the summed loss at each index of a text, by budget.

    `counts` are the response tokens at each index. The first is predicted by the prompt; the one at index j + 1 by the
    token at generation position j.
    """

    counts: tuple[int, ...]
    sums: Mapping[int, tuple[float, ...]]

    def mean(self, budget: int) -> float:
        """Loss per token when every position runs `budget` layers, as measured."""
        return sum(self.sums[budget]) / sum(self.counts)

    def predict(self, budgets: Sequence[int]) -> float:
        """Loss per token of a curve; its last budget holds for all later positions.

        Raises
        ------
        ScheduleError
            If a budget was not measured.
        """
        if missing := sorted(set(budgets) - set(self.sums)):
            raise ScheduleError(f"no loss was measured at {missing[0]} layers: measured are {sorted(self.sums)}")
        total = self.sums[budgets[0]][0]
        for position in range(len(self.counts) - 1):
            total += self.sums[budgets[min(position, len(budgets) - 1)]][position + 1]
        return total / sum(self.counts)

    def by_bucket(self, starts: Sequence[int]) -> list[dict[int, float]]:
        """Summed loss by budget for each bucket of positions, the bucket's first positions given.

        The first bucket also has what the first token, which comes out of the prompt, loses more than at full depth.
        """
        ends = [*starts[1:], len(self.counts) - 1]
        found = [
            {budget: sum(values[first + 1 : end + 1]) for budget, values in self.sums.items()}
            for first, end in zip(starts, ends, strict=True)
        ]
        full = self.sums[max(self.sums)][0]
        return [{budget: loss + self.sums[budget][0] - full for budget, loss in found[0].items()}, *found[1:]]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {"counts": list(self.counts), "sums": {str(b): list(v) for b, v in sorted(self.sums.items())}}


def bucket_starts(counts: Sequence[int], buckets: int) -> tuple[int, ...]:
    """First positions of at most `buckets` buckets of about as many tokens each, from the tokens at each position."""
    before = [0, *accumulate(counts)][:-1]
    total = sum(counts)
    starts = [0]
    for position in range(1, len(counts)):
        if len(starts) < buckets and before[position] * buckets >= total * len(starts):
            starts.append(position)
    return tuple(starts)


def best_curve(
    losses: Sequence[Mapping[int, float]], costs: Sequence[Mapping[int, float]], limit: float
) -> tuple[int, ...] | None:
    """A budget for each bucket, never rising, by dynamic programming.

    Parameters
    ----------
    losses, costs : sequence of mapping
        A mapping from budget for each bucket; the same budgets in all buckets.
    limit : float
        Most that the costs may add up to.

    Returns
    -------
    tuple of int or None
        Non-increasing, of least summed loss, the cheaper one of equals; None if not even the cheapest curve fits.
    """
    budgets = sorted(losses[0], reverse=True)
    rest = _cheapest_rest(costs)
    fronts: dict[int, list[_Point]] = {budget: [] for budget in budgets}
    fronts[budgets[0]] = [(0.0, 0.0, None)]
    for loss, cost, later in zip(losses, costs, rest, strict=True):
        so_far: list[_Point] = []
        grown: dict[int, list[_Point]] = {}
        for budget in budgets:
            # A curve may come down to this budget from any that is as high or higher.
            so_far = _front(so_far, fronts[budget])
            grown[budget] = [
                (spent + cost[budget], lost + loss[budget], (budget, chain))
                for spent, lost, chain in so_far
                if spent + cost[budget] + later <= limit * SLACK
            ]
        fronts = grown
    ends = [point for front in fronts.values() for point in front]
    if not ends:
        return None
    _, lost, chain = min(ends, key=lambda point: (point[1], point[0]))
    flat = best_flat(losses, costs, limit)
    if flat is not None and sum(loss[flat] for loss in losses) < lost:
        return (flat,) * len(losses)  # only if thinning lost it
    return _unrolled(chain)


def best_flat(losses: Sequence[Mapping[int, float]], costs: Sequence[Mapping[int, float]], limit: float) -> int | None:
    """The one budget for all buckets of least summed loss within the limit; None if none fits."""
    fitting = [b for b in losses[0] if sum(cost[b] for cost in costs) <= limit * SLACK]
    return min(fitting, key=lambda b: (sum(loss[b] for loss in losses), b), default=None)


def _cheapest_rest(costs: Sequence[Mapping[int, float]]) -> list[float]:
    """What the buckets after each one cost at least."""
    rest = [0.0]
    for cost in reversed(costs[1:]):
        rest.append(rest[-1] + min(cost.values()))
    return rest[::-1]


def _front(left: list[_Point], right: list[_Point]) -> list[_Point]:
    """The points of two fronts that no other one beats, by rising cost and so by falling loss."""
    kept: list[_Point] = []
    for point in heapq.merge(left, right, key=lambda p: p[:2]):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept if len(kept) <= MOST_POINTS else _thinned(kept)


def _thinned(front: list[_Point]) -> list[_Point]:
    """The best point of each of `MOST_POINTS` cells of cost, and the cheapest."""
    low, high = front[0][0], front[-1][0]
    cells = {int((point[0] - low) / (high - low) * MOST_POINTS): point for point in front}
    return [front[0], *(point for point in cells.values() if point is not front[0])]


def _unrolled(chain: Any) -> tuple[int, ...]:
    found = []
    while chain is not None:
        budget, chain = chain
        found.append(budget)
    return tuple(reversed(found))
