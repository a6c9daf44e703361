"""Records by length: quarters of the data by prompt or reference length, the same for every run on the same records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Bucket", "buckets_of"]


@dataclass(frozen=True)
class Bucket:
    """Records whose length is in a range.

    Parameters
    ----------
    low, high : int
        Shortest and longest length in it, in tokens.
    indices : tuple of int
        Its records.
    """

    low: int
    high: int
    indices: tuple[int, ...]


def buckets_of(lengths: Sequence[int], count: int = 4) -> list[Bucket]:
    """At most `count` buckets of about equal numbers of records, cut between different lengths; none is empty."""
    if not lengths:
        return []
    values = np.asarray(lengths)
    limits = sorted({int(v) for v in np.quantile(values, np.arange(1, count + 1) / count, method="higher")})
    buckets = []
    for lower, upper in zip([-1, *limits], limits, strict=False):
        indices = np.flatnonzero((values > lower) & (values <= upper))
        if len(indices):
            inside = values[indices]
            buckets.append(Bucket(int(inside.min()), int(inside.max()), tuple(int(i) for i in indices)))
    return buckets
