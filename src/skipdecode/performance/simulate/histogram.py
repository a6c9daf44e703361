"""Percentiles of any number of values in bounded memory: counts in buckets of equal ratio. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from skipdecode.errors import UsageError

__all__ = ["LogHistogram"]

_RATIO = 1.01
_LOG_RATIO = math.log(_RATIO)


@dataclass
class LogHistogram:
    """Non-negative values, each known to within half a percent; count, sum and largest value are exact.

    A bucket reaches from b to 1.01·b, and a percentile is its geometric middle. Zero has a bucket of its own.
    """

    count: int = 0
    total: float = 0.0
    largest: float = 0.0
    _zeros: int = 0
    _buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.count += times
        self.total += value * times
        if value > self.largest:
            self.largest = value
        if value > 0:
            bucket = math.floor(math.log(value) / _LOG_RATIO)
            self._buckets[bucket] = self._buckets.get(bucket, 0) + times
        else:
            self._zeros += times

    def add_line(self, first: float, slope: float, steps: int, times: int) -> None:
        """Count first, first + slope, … (`steps` values, `slope` 0 or more), each `times` times."""
        if slope == 0 or first + slope * (steps - 1) < first * 1.0001:
            self.add(first + slope * (steps - 1) / 2, steps * times)
            return
        done = 0
        while done < steps:
            value = first + slope * done
            fit = 1
            if value > 0:
                above = math.exp(_LOG_RATIO * (math.floor(math.log(value) / _LOG_RATIO) + 1))
                fit = min(steps - done, max(1, math.ceil((above - value) / slope)))
            self.add(value + slope * (fit - 1) / 2, fit * times)
            done += fit
        self.largest = max(self.largest, first + slope * (steps - 1))

    def merge(self, other: LogHistogram) -> None:
        """Count all values of another histogram."""
        self.count += other.count
        self.total += other.total
        self.largest = max(self.largest, other.largest)
        self._zeros += other._zeros
        for bucket, times in other._buckets.items():
            self._buckets[bucket] = self._buckets.get(bucket, 0) + times

    @property
    def mean(self) -> float:
        """Exact mean; 0 without values."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The least value that at least this share of the values does not exceed; 0 without values.

        Raises
        ------
        UsageError
            If `share` is not in [0, 1].
        """
        if not 0 <= share <= 1:
            raise UsageError(f"share={share!r} is not accepted: give a number from 0 to 1")
        left = max(1, math.ceil(share * self.count)) - self._zeros
        if self.count == 0 or left <= 0:
            return 0.0
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(self.largest, math.exp(_LOG_RATIO * (bucket + 0.5)))
        return self.largest

    def to_dict(self) -> dict[str, float]:
        """Mean, median, 90th and 99th percentile, largest value."""
        return {"mean": self.mean} | {f"p{p}": self.quantile(p / 100) for p in (50, 90, 99)} | {"max": self.largest}
