"""Bootstrap intervals from tables of statistics per record. Only numpy; knows nothing about text.

Records are resampled with replacement. Both runs of a pair are scored on the same resamples (Koehn, 2004), so the
difficulty of a record cancels. Intervals are percentile intervals. The seed determines the resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skipdecode.errors import DataError, UsageError

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
    _check(table, table, resamples)
    values = np.array([score(total) for (total,) in _totals((table,), resamples, seed)])
    return _interval(score(table.sum(axis=0)), values)


def compare(a: Table, b: Table, score: Scorer, *, resamples: int = 1000, seed: int = 0) -> Paired:
    """Difference and ratio of two runs' scores with paired intervals; arguments as `interval`.

    Raises DataError: the tables have different shapes: the runs have different records.
    """
    _check(a, b, resamples)
    pairs = np.array([(score(x), score(y)) for x, y in _totals((a, b), resamples, seed)])
    first, second = score(a.sum(axis=0)), score(b.sum(axis=0))
    ratio = None
    if first != 0 and np.all(pairs[:, 0] != 0):
        ratio = _interval(second / first, pairs[:, 1] / pairs[:, 0])
    return Paired(first, second, _interval(second - first, pairs[:, 1] - pairs[:, 0]), ratio)


def _check(a: Table, b: Table, resamples: int) -> None:
    if a.shape != b.shape or a.ndim != 2:
        raise DataError(f"statistics of shape {a.shape} and {b.shape} do not pair up: compare runs on the same records")
    if not len(a):
        raise DataError("no record to resample: a bootstrap needs one or more")
    if resamples < 1:
        raise UsageError(f"resamples={resamples} is not accepted: give 1 or more")


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
