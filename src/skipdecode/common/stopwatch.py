"""Timing of the sides of a comparison, in turn, on the same pieces of work: medians of rounds, ratios with intervals.

The speed of a machine changes during a measurement. Each side therefore does a piece of work in each round, in reverse
order every other time, and ratios are computed within a round before medians are taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import numpy as np

from skipdecode.common.bootstrap import Interval, Table, interval, ratio_of_sums

Side = TypeVar("Side", bound=Hashable)
Lap = TypeVar("Lap")


class Stopwatch(Generic[Side, Lap]):
    """The times of sides for pieces of work, by rounds.

    A *lap* is the time of one side for one piece in one round: seconds, or an object with several times. A `clock`
    returns the seconds of a lap.
    """

    def __init__(self, sides: Iterable[Side]) -> None:
        self.sides = list(sides)
        self._pieces: dict[Hashable, list[Mapping[Side, Lap]]] = {}

    def lap(self, work: Callable[[Side], Lap], piece: Hashable = None) -> Mapping[Side, Lap]:
        """Run a piece of work once on each side; returns the laps in the order of the sides."""
        rounds = self._pieces.setdefault(piece, [])
        backwards = (len(rounds) + list(self._pieces).index(piece)) % 2
        found = {side: work(side) for side in self.sides[:: -1 if backwards else 1]}
        rounds.append({side: found[side] for side in self.sides})
        return rounds[-1]

    def add(self, laps: Mapping[Side, Lap], piece: Hashable = None) -> None:
        """Add a round of a piece from an earlier run."""
        self._pieces.setdefault(piece, []).append(laps)

    def rounds(self, side: Side) -> list[list[Lap]]:
        """The laps of a side: the rounds of each piece."""
        return [[laps[side] for laps in rounds] for rounds in self._pieces.values()]

    def laps(self, side: Side) -> list[Lap]:
        """All laps of a side, by piece."""
        return [lap for rounds in self.rounds(side) for lap in rounds]

    def seconds(self, side: Side, clock: Callable[[Lap], float]) -> float:
        """The sum over the pieces of the median of their rounds."""
        return sum(statistics.median(map(clock, rounds)) for rounds in self.rounds(side))

    def ratio(self, over: Side, under: Side, clock: Callable[[Lap], float]) -> float | None:
        """The time of `over` divided by that of `under`: the median ratio of each piece, weighted by its seconds.

        None if a lap took no time.
        """
        table = self._pairs(over, under, clock)
        return None if table is None else ratio_of_sums(table.sum(axis=0))

    def interval(
        self, over: Side, under: Side, clock: Callable[[Lap], float], *, resamples: int = 1000, seed: int = 0
    ) -> Interval | None:
        """The bootstrap interval of `ratio` over the pieces, of a single piece over its rounds; None for one lap."""
        table = self._pairs(over, under, clock)
        if table is not None and len(table) == 1:
            table = np.asarray([(clock(a), clock(b)) for a, b in zip(self.laps(over), self.laps(under), strict=True)])
        if table is None or len(table) < 2:
            return None
        return interval(table, ratio_of_sums, resamples=resamples, seed=seed)

    def _pairs(self, over: Side, under: Side, clock: Callable[[Lap], float]) -> Table | None:
        """Seconds of both sides for each piece, (pieces, 2)."""
        rows = []
        for first, second in zip(self.rounds(over), self.rounds(under), strict=True):
            pairs = [(clock(a), clock(b)) for a, b in zip(first, second, strict=True)]
            if not all(b for _, b in pairs):
                return None
            seconds = statistics.median(b for _, b in pairs)
            rows.append((seconds * statistics.median(a / b for a, b in pairs), seconds))
        return np.asarray(rows, dtype=np.float64) if rows else None
