"""Measured losses by generation position and budget, and the loss they predict for a curve. Pure Python.

An entry is the loss at a position when *all* positions run that budget. A curve gives each position its own, so the sum
over positions is a prediction: exact for flat curves, and otherwise as good as a token's loss depends on its own depth
more than on that of the tokens before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from skipdecode.errors import ScheduleError

__all__ = ["LossTable", "bucket_starts"]


@dataclass(frozen=True)
class LossTable:
    """Losses under one drop order.

    Parameters
    ----------
    counts : tuple of int
        Response tokens at each index in their text. The first is predicted by the prompt; the one at index j + 1 by the
        token at generation position j.
    sums : mapping of int to tuple of float
        By budget: the summed loss at each index.
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
        """Summed loss by budget for each bucket of positions, the bucket's first positions given."""
        ends = [*starts[1:], len(self.counts) - 1]
        return [
            {budget: sum(values[first + 1 : end + 1]) for budget, values in self.sums.items()}
            for first, end in zip(starts, ends, strict=True)
        ]

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
