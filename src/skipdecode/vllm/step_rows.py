"""Which rows of a step run which layer, from positions alone. numpy; knows nothing of vLLM.

A *row* is one token of the step. A request's rows lie side by side, in the order of the text, and because schedules are
nested a layer runs a first part of them: all, none, or (a text computed anew after preemption, or drafted tokens) some.
Where prompts project, it runs a part from the prompt's last token on, and keys and values of those before are stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from skipdecode.models.plan import AFTER, PROMPT, layer_bounds
from skipdecode.schedule import Schedule

ALL = -1
"""In `StepRows`: every row."""
NONE = -2
"""In `StepRows`: no row."""

_NEVER = np.int64(AFTER)  # past any text
Selection = slice | NDArray[np.int64]


@dataclass(frozen=True)
class StepBatch:
    """The requests of a step, in the order of their rows; arrays of one value a request."""

    start: NDArray[np.int64]  # tokens of the request that are in the KV cache
    rows: NDArray[np.int64]  # tokens that this step computes
    prompt: NDArray[np.int64]  # length of the prompt
    schedule: NDArray[np.int64]  # number of the request's schedule

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return int(self.rows.sum())


@dataclass(frozen=True)
class RowSubset:
    """The rows that a layer runs, or projects, where these are some and not all."""

    requests: Selection  # requests that have such rows
    rows: Selection  # the rows
    counts: NDArray[np.int64]  # rows of each of `requests`
    lead: NDArray[np.int64]  # rows at the beginning of each of `requests` that are not among them
    cut: NDArray[np.int64]  # rows at the end of each of `requests` that are not among them


@dataclass(frozen=True)
class StepRows:
    """The rows of every layer in one step."""

    layers: tuple[int, ...]  # the rows that each layer runs: an index into `parts`, `ALL` or `NONE`
    projects: tuple[int, ...]  # the rows whose keys and values it stores without running on them, likewise
    parts: tuple[RowSubset, ...]  # different selections; layers with the same one share it
    num_rows: int  # rows of the step
    # The rows that take a bridge over each layer, as in `layers`; empty where no row does.
    bridges: tuple[int, ...] = ()
    # (num_rows,) Number of each row's schedule, and whether it is the first token of its text; in a step that projects.
    schedules: NDArray[np.int64] | None = field(default=None, compare=False)
    starts: NDArray[np.bool_] | None = field(default=None, compare=False)

    def bridge(self, layer: int) -> int:
        """The rows that take a bridge over a layer: an index into `parts`, `ALL` or `NONE`."""
        return self.bridges[layer] if self.bridges else NONE


class LayerLimits:
    """Limits, counted from the prompt's end, between which a text runs each layer: all that a step needs to know.

    `schedules`: they are numbered in this order. `bridged`: layers that have a bridge.
    """

    def __init__(self, schedules: Sequence[Schedule], bridged: Collection[int] = ()) -> None:
        self.num_layers = schedules[0].num_layers
        # Tokens are counted from the prompt's end: `PROMPT` stands for all of the prompt, and so for its beginning.
        bounds = np.array([layer_bounds(s) for s in schedules], np.int64).transpose(1, 0, 2)
        self._first, self._end, self._bridged = np.where(bounds == PROMPT, -_NEVER, bounds)
        self._bridged[:, [layer for layer in range(self.num_layers) if layer not in bridged]] = _NEVER
        self._full = np.array([s.is_full for s in schedules])
        # From here on no schedule changes: a step like the last one needs no new plan.
        self._settled = max([0, *self._end[self._end < _NEVER].tolist()])
        self._last: tuple[tuple[bytes, ...], StepRows | None] = (), None

    def counts(self, batch: StepBatch) -> NDArray[np.int64]:
        """Rows of each request (first axis) that run each layer (second axis)."""
        lead, end = self._spans(batch)
        return end - lead

    def depth(self, batch: StepBatch) -> NDArray[np.int64]:
        """Layers that the first row of each request runs."""
        at = (batch.start - batch.prompt)[:, None]
        runs = (self._first[batch.schedule] <= at) & (at < self._end[batch.schedule])
        depth: NDArray[np.int64] = np.count_nonzero(runs, axis=1)
        return depth

    def step(self, batch: StepBatch) -> StepRows | None:
        """The rows of every layer; None if all rows run all layers."""
        if self._full[batch.schedule].all():
            return None
        age = np.minimum(batch.start - batch.prompt, self._settled)
        key = tuple(a.tobytes() for a in (batch.schedule, batch.rows, age, batch.start == 0))
        if key != self._last[0]:
            self._last = key, self._plan(batch)
        return self._last[1]

    def _plan(self, batch: StepBatch) -> StepRows | None:
        lead, end = self._spans(batch)
        counts = end - lead
        if (counts == batch.rows[:, None]).all():
            return None
        offsets = np.concatenate(([0], np.cumsum(batch.rows)))
        known: dict[tuple[bytes, bytes], int] = {}
        parts: list[RowSubset] = []

        def kind(first: NDArray[np.int64], count: NDArray[np.int64]) -> int:
            if not count.any():
                return NONE
            if (count == batch.rows).all():
                return ALL
            key = (first.tobytes(), count.tobytes())
            if key not in known:
                known[key] = len(parts)
                parts.append(_part(first, count, batch.rows, offsets))
            return known[key]

        leads = np.ascontiguousarray(lead.T)
        layers = tuple([kind(*columns) for columns in zip(leads, np.ascontiguousarray(counts.T), strict=True)])
        projects = tuple([kind(lead[:, 0] * 0, column) for column in leads]) if lead.any() else (NONE,) * len(layers)
        before = self._rows_before(self._bridged, batch)
        across = np.ascontiguousarray(batch.rows[:, None] - before).T
        bridges = tuple([kind(*columns) for columns in zip(np.ascontiguousarray(before.T), across, strict=True)])
        schedules = starts = None
        if lead.any():
            schedules, starts = np.repeat(batch.schedule, batch.rows), np.zeros(offsets[-1], np.bool_)
            starts[offsets[:-1][batch.start == 0]] = True
        bridges = bridges if across.any() else ()
        return StepRows(layers, projects, tuple(parts), int(offsets[-1]), bridges, schedules, starts)

    def _spans(self, batch: StepBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Count, for each request and layer, the rows that it projects before rows that run, and where these end."""
        return self._rows_before(self._first, batch), self._rows_before(self._end, batch)

    @staticmethod
    def _rows_before(limits: NDArray[np.int64], batch: StepBatch) -> NDArray[np.int64]:
        """Count the rows of this step before a limit, for each request and layer."""
        remaining = (batch.prompt - batch.start)[:, None]
        before: NDArray[np.int64] = np.clip(limits[batch.schedule] + remaining, 0, batch.rows[:, None])
        return before


def _part(
    lead: NDArray[np.int64], counts: NDArray[np.int64], rows: NDArray[np.int64], offsets: NDArray[np.int64]
) -> RowSubset:
    chosen = np.flatnonzero(counts)
    some, before = counts[chosen], lead[chosen]
    cut = rows[chosen] - before - some
    starts = offsets[chosen] + before
    first, last = int(chosen[0]), int(chosen[-1])
    side_by_side = last - first + 1 == len(chosen)
    requests: Selection = slice(first, last + 1) if side_by_side else chosen
    begin, end = int(starts[0]), int(starts[-1] + some[-1])
    if end - begin == some.sum():
        return RowSubset(requests, slice(begin, end), some, before, cut)
    index = np.concatenate([np.arange(begin, begin + n) for begin, n in zip(starts, some, strict=True)])
    return RowSubset(requests, index, some, before, cut)
