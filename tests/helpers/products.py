"""Products of test parameters that are complete under `slow`, and pairwise in the default suite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest


def in_turn(*axes: Iterable[Any], slow: Iterable[Any] = ()) -> Iterator[Any]:
    """All combinations; the default suite has one value of the last axis, in turn, for each combination of the others.

    Each pair of values of two axes is in the default suite if the other axes are long enough. The first axis has the
    `slow` values too, which are not in the default suite.
    """
    for values in product(slow, *axes[1:]):
        yield pytest.param(*values, marks=pytest.mark.slow, id="-".join(map(str, values)))
    *others, last = (list(axis) for axis in axes)
    for *places, place in product(*(range(len(axis)) for axis in (*others, last))):
        values = *(axis[i] for axis, i in zip(others, places, strict=True)), last[place]
        marks = () if (sum(places) - place) % len(last) == 0 else pytest.mark.slow
        yield pytest.param(*values, marks=marks, id="-".join(map(str, values)))
