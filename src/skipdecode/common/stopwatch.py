"""Times the sides of a comparison in turn on the same pieces of work: medians of rounds, ratios with intervals.

A machine's speed changes while it is measured. So every side does a piece of work in each round, every other time in
reverse order, and a ratio is formed within a round before medians are taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

import numpy as np

from skipdecode.common.bootstrap import Interval, Table, interval, ratio_of_sums

__all__ = ["Stopwatch", "timed"]

Side = TypeVar("Side", bound=Hashable)
Lap = TypeVar("Lap")


def timed(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Stopwatch(Generic[Side, Lap]):
    """What sides took for pieces of work, round by round.

    A *lap* is what one side took for one piece in one round: seconds, or an object with several times. A `clock` reads
    seconds from a lap.
    """

    def __init__(self, sides: Iterable[Side]) -> None:
        self.sides = list(sides)
        self._pieces: dict[Hashable, list[Mapping[Side, Lap]]] = {}

    def lap(self, work: Callable[[Side], Lap], piece: Hashable = None) -> Mapping[Side, Lap]:
        """Have every side do a piece of work once; their laps, in the order of the sides."""
        rounds = self._pieces.setdefault(piece, [])
        backwards = (len(rounds) + list(self._pieces).index(piece)) % 2
        found = {side: work(side) for side in self.sides[:: -1 if backwards else 1]}
        rounds.append({side: found[side] for side in self.sides})
        return rounds[-1]

    def add(self, laps: Mapping[Side, Lap], piece: Hashable = None) -> None:
        """Take over a round of a piece that an earlier run has timed."""
        self._pieces.setdefault(piece, []).append(laps)

    def rounds(self, side: Side) -> list[list[Lap]]:
        """The laps of a side: of each piece its rounds."""
        return [[laps[side] for laps in rounds] for rounds in self._pieces.values()]

    def laps(self, side: Side) -> list[Lap]:
        """The laps of a side, piece after piece."""
        return [lap for rounds in self.rounds(side) for lap in rounds]

    def seconds(self, side: Side, clock: Callable[[Lap], float]) -> float:
        """The sum over the pieces of the median of their rounds."""
        return sum(statistics.median(map(clock, rounds)) for rounds in self.rounds(side))

    def ratio(self, over: Side, under: Side, clock: Callable[[Lap], float]) -> float | None:
        """How many times the seconds of `under` the side `over` takes: of each piece the median of the rounds' ratios,
        each piece weighted by its seconds. None if some lap took no time.
        """
        table = self._pairs(over, under, clock)
        return None if table is None else ratio_of_sums(table.sum(axis=0))

    def interval(
        self, over: Side, under: Side, clock: Callable[[Lap], float], *, resamples: int = 1000, seed: int = 0
    ) -> Interval | None:
        """The bootstrap interval of `ratio` over the pieces; None for one piece alone."""
        table = self._pairs(over, under, clock)
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
