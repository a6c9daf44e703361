"""Which rows of a step run which layer, from positions alone. numpy; knows neither vLLM nor torch.

A *row* is one token of the step. A request's rows lie side by side, in the order of the text, and because schedules are
nested a layer runs a first part of them: all, none, or (a text computed anew after preemption, or drafted tokens) some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipdecode.schedule import Schedule

__all__ = ["ALL", "NONE", "LayerLimits", "RowSubset", "StepBatch", "StepRows"]

ALL = -1
"""In `StepRows.layers`: every row runs the layer."""
NONE = -2
"""In `StepRows.layers`: no row runs the layer."""

_NEVER = np.int64(2**40)  # past any text
Selection = slice | NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """The requests of a step, in the order of their rows; arrays of one value a request.

    Parameters
    ----------
    start : array of int
        Tokens of the request that are in the KV cache.
    rows : array of int
        Tokens that this step computes.
    prompt : array of int
        Length of the prompt.
    schedule : array of int
        Number of the request's schedule.
    """

    start: NDArray[np.int64]
    rows: NDArray[np.int64]
    prompt: NDArray[np.int64]
    schedule: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return int(self.rows.sum())


@dataclass(frozen=True)
class RowSubset:
    """The rows that a layer runs, where these are some and not all.

    Parameters
    ----------
    requests : slice or array of int
        Requests that have such rows.
    rows : slice or array of int
        The rows.
    rest : tuple of slice, or array of int
        All other rows.
    counts : array of int
        Rows of each of `requests`.
    cut : array of int
        Rows at the end of each of `requests` that do not run.
    """

    requests: Selection
    rows: Selection
    rest: tuple[slice, ...] | NDArray[np.int64]
    counts: NDArray[np.int64]
    cut: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """How many rows run."""
        return int(self.counts.sum())


@dataclass(frozen=True)
class StepRows:
    """The rows of every layer in one step.

    Parameters
    ----------
    layers : tuple of int
        For each layer an index into `parts`, `ALL` or `NONE`.
    parts : tuple of RowSubset
        Different selections; layers with the same one share it.
    num_rows : int
        Rows of the step.
    """

    layers: tuple[int, ...]
    parts: tuple[RowSubset, ...]
    num_rows: int

    def rows_of(self, layer: int) -> int:
        """How many rows run a layer."""
        kind = self.layers[layer]
        return self.num_rows if kind == ALL else 0 if kind == NONE else self.parts[kind].num_rows


class LayerLimits:
    """How far past its prompt's end a text runs each layer: all that a step needs to know of the schedules.

    Parameters
    ----------
    schedules : sequence of Schedule
        In the order of their numbers.
    """

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.num_layers = schedules[0].num_layers
        self._table = np.array([_limits(s) for s in schedules], dtype=np.int64)
        self._full = np.array([s.is_full for s in schedules])

    def counts(self, batch: StepBatch) -> NDArray[np.int64]:
        """Rows of each request (first axis) that run each layer (second axis)."""
        left = self._table[batch.schedule] + (batch.prompt - batch.start)[:, None]
        return np.clip(left, 0, batch.rows[:, None])

    def depth(self, batch: StepBatch) -> NDArray[np.int64]:
        """Layers that the first row of each request runs."""
        first = self._table[batch.schedule] + (batch.prompt - batch.start)[:, None]
        depth: NDArray[np.int64] = np.count_nonzero(first > 0, axis=1)
        return depth

    def step(self, batch: StepBatch) -> StepRows | None:
        """The rows of every layer; None if all rows run all layers."""
        if self._full[batch.schedule].all():
            return None
        counts = self.counts(batch)
        if (counts == batch.rows[:, None]).all():
            return None
        offsets = np.concatenate(([0], np.cumsum(batch.rows)))
        known: dict[bytes, int] = {}
        parts: list[RowSubset] = []
        layers = []
        for column in np.ascontiguousarray(counts.T):
            key = column.tobytes()
            kind = known.get(key)
            if kind is None:
                if not column.any():
                    kind = NONE
                elif (column == batch.rows).all():
                    kind = ALL
                else:
                    kind = len(parts)
                    parts.append(_part(column, batch.rows, offsets))
                known[key] = kind
            layers.append(kind)
        return StepRows(tuple(layers), tuple(parts), int(offsets[-1]))


def _limits(schedule: Schedule) -> list[Any]:
    """For each layer the first token, counted from the prompt's end, that does not run it."""
    on_prompt = set(schedule.prompt_layers())
    limits = []
    for layer in range(schedule.num_layers):
        drop = schedule.drop_position(layer)
        limits.append(-_NEVER if layer not in on_prompt else _NEVER if drop is None else np.int64(drop))
    return limits


def _part(counts: NDArray[np.int64], rows: NDArray[np.int64], offsets: NDArray[np.int64]) -> RowSubset:
    chosen = np.flatnonzero(counts)
    some = counts[chosen]
    cut = rows[chosen] - some
    first, last = int(chosen[0]), int(chosen[-1])
    side_by_side = last - first + 1 == len(chosen)
    requests: Selection = slice(first, last + 1) if side_by_side else chosen
    if side_by_side and not cut[:-1].any():
        begin, end, total = int(offsets[first]), int(offsets[last + 1] - cut[-1]), int(offsets[-1])
        rest = tuple(s for s in (slice(0, begin), slice(end, total)) if s.stop > s.start)
        return RowSubset(requests, slice(begin, end), rest, some, cut)
    index = np.concatenate([np.arange(offsets[r], offsets[r] + n) for r, n in zip(chosen, some, strict=True)])
    others = np.setdiff1d(np.arange(offsets[-1]), index, assume_unique=True)
    return RowSubset(requests, index, others, some, cut)
