"""Bootstrap intervals from tables of statistics per record, and of the times of sides that take turns. Only numpy.

Records are resampled with replacement. Both runs of a pair are scored on the same resamples (Koehn, 2004), so the
difficulty of a record cancels. Intervals are percentile intervals. The seed determines the resamples.

The speed of a machine changes during a measurement. Each side of a comparison therefore does a piece of work in each
round, in reverse order every other time, and ratios are computed within a round before medians are taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from skipdecode.errors import DataError

Table = NDArray[np.float64]
Scorer = Callable[[Table], float]
_CHUNK = 256


@dataclass(frozen=True)
class Interval:
    """An estimate, with the bounds of the central share `level` of the resampled values."""

    estimate: float
    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True)
class Paired:
    """Scores of the runs A and B on the same records, with b - a and b / a.

    The ratio is None if the score of A is 0, in the data or in a resample.
    """

    a: float
    b: float
    difference: Interval
    ratio: Interval | None


def ratio_of_sums(total: Table) -> float:
    """The ratio of `total` (numerator, denominator), shape (2,), the sum over records; 0 if the denominator is 0."""
    return float(total[0] / total[1]) if total[1] else 0.0


def interval(table: Table, score: Scorer, *, resamples: int = 1000, seed: int = 0) -> Interval:
    """The score of one run with its bootstrap interval.

    `table`: statistics of each record. `score`: from the sum over records, shape (k,), to a score. `resamples` and
    `seed`: number of resamples, and their seed.
    """
    _check(table, table)
    values = np.array([score(total) for (total,) in _totals((table,), resamples, seed)])
    return _interval(score(table.sum(axis=0)), values)


def compare(a: Table, b: Table, score: Scorer, *, resamples: int = 1000, seed: int = 0) -> Paired:
    """Difference and ratio of two runs' scores with paired intervals; arguments as `interval`.

    Raises DataError: the tables have different shapes: the runs have different records.
    """
    _check(a, b)
    pairs = np.array([(score(x), score(y)) for x, y in _totals((a, b), resamples, seed)])
    first, second = score(a.sum(axis=0)), score(b.sum(axis=0))
    ratio = None
    if first != 0 and np.all(pairs[:, 0] != 0):
        ratio = _interval(second / first, pairs[:, 1] / pairs[:, 0])
    return Paired(first, second, _interval(second - first, pairs[:, 1] - pairs[:, 0]), ratio)


def _check(a: Table, b: Table) -> None:
    if a.shape != b.shape or a.ndim != 2:
        raise DataError(f"statistics of shape {a.shape} and {b.shape} do not pair up: compare runs on the same records")
    if not len(a):
        raise DataError("no record to resample: a bootstrap needs one or more")


def _totals(tables: tuple[Table, ...], resamples: int, seed: int) -> Iterator[tuple[Table, ...]]:
    """The sums of each resample, for each table: the product of the table with the counts of the records."""
    count = len(tables[0])
    random = np.random.default_rng(seed)
    for start in range(0, resamples, _CHUNK):
        size = min(_CHUNK, resamples - start)
        weights = random.multinomial(count, np.full(count, 1 / count), size=size).astype(np.float64)
        yield from zip(*(weights @ table for table in tables), strict=True)


def _interval(estimate: float, values: Table) -> Interval:
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(float(estimate), float(low), float(high))


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
        results = {side: work(side) for side in self.sides[:: -1 if backwards else 1]}
        rounds.append({side: results[side] for side in self.sides})
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
        """Ratio of the times of `over` and `under`: the median ratio of each piece, weighted by its seconds.

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
