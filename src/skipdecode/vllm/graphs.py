"""CUDA graphs of decode steps by depth: which layer sets are captured, and which graph a step replays.

vLLM captures the whole model once for each number of rows, and finds the graph by a `BatchDescriptor`; it replays the
layers of its capture. So a descriptor has a *level* here, a set of layers; the rest stays vLLM's, as do full steps.

In a *masked* level each layer computes all rows, and those that sit it out are put back by a buffer that is filled
before the replay. What such a row stores as keys and values there is never read: its later tokens sit it out too.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from skipdecode.schedule import Schedule
from skipdecode.vllm.step_rows import ALL, NONE, StepRows

_MOST_LEVELS, _MOST_GRAPHS = 4, 256

_log = logging.getLogger("vllm.skipdecode")


@dataclass(frozen=True)
class DepthDescriptor(BatchDescriptor):  # type: ignore[misc]
    """vLLM's key of a graph with a level: equal neither to the plain key nor to another level's."""

    level: int = -1


@dataclass(frozen=True)
class Level:
    """Layers that a graph runs; `masked`: it serves rows that sit some of them out, too."""

    layers: frozenset[int]
    masked: bool

    def serves(self, layers: frozenset[int], alike: bool) -> bool:
        """Whether a step whose rows run `layers` between them, all of them `alike` or not, can replay it."""
        return layers <= self.layers if self.masked else alike and layers == self.layers


def choose_levels(schedules: Sequence[Schedule]) -> tuple[Level, ...]:
    """The levels of some schedules, four at most, those that spare most first.

    A flat schedule alone gets an unmasked one: its rows run the same layers at any age. Others share masked ones,
    chosen one by one so that the listed positions run as few layers as possible. The last serves every other step.
    """
    several = sum(not s.is_full for s in schedules) > 1
    wanted: defaultdict[Level, float] = defaultdict(float)
    for schedule in schedules:
        for position in range(schedule.seq_len):
            layers = frozenset(schedule.layers(position))
            wanted[Level(layers, masked=several or not schedule.is_flat)] += 1 / schedule.seq_len
    levels = [Level(frozenset(range(schedules[0].num_layers)), masked=True)]

    def layers_run(levels: list[Level]) -> float:
        least = {w: min(len(n.layers) for n in levels if n.serves(w.layers, not w.masked)) for w in wanted}
        return sum(share * least[w] for w, share in wanted.items())

    while len(levels) < _MOST_LEVELS:
        best = min(wanted, key=lambda w: layers_run([*levels, w]))
        if layers_run([*levels, best]) >= layers_run(levels):
            break
        levels.append(best)
    return (*levels[1:], levels[0])


class DepthGraphs:
    """The graphs by depth of one model runner.

    Parameters
    ----------
    bridged : frozenset of int
        Layers that have a bridge, which all rows that sit such a layer out take in a graph.

    Attributes
    ----------
    levels : tuple of Level
        A descriptor's `level` is an index into it.
    keep : Tensor
        (rows, layers), bool: whether a row keeps what a layer made of it. Captured graphs read it where it lies.
    captured : set of DepthDescriptor
        Graphs that there are.
    """

    def __init__(
        self, schedules: Sequence[Schedule], most_rows: int, device: torch.device, bridged: frozenset[int] = frozenset()
    ) -> None:
        self.levels = choose_levels(schedules)
        self.keep = torch.zeros(most_rows, schedules[0].num_layers, dtype=torch.bool, device=device)
        self.captured: set[DepthDescriptor] = set()
        self._bridged = bridged
        self._capturing: int | None = None
        self._filled: StepRows | None = None

    def capture(self, plain: Any, sizes: int, run: Callable[[StepRows, Tensor | None], None]) -> None:
        """Capture the levels of one of vLLM's `sizes` keys by what `run` does for a step, with `keep` if masked."""
        layers, levels = range(self.keep.shape[1]), self.levels[: _MOST_GRAPHS // sizes]
        if not self.captured:
            _log.info("skipdecode: CUDA graphs of %d sizes by %s layers", sizes, [len(n.layers) for n in levels])
        # The full depth first: its memory is enough for the others.
        for number, level in reversed(list(enumerate(levels))):
            kinds = tuple(ALL if i in level.layers else NONE for i in layers)
            across = tuple(NONE if i in level.layers else ALL for i in layers)
            step = StepRows(kinds, (NONE,) * len(layers), (), plain.num_tokens, across)
            self._capturing = number
            try:
                run(step, self.keep if level.masked else None)
            finally:
                self._capturing = None
            self.captured.add(DepthDescriptor(**asdict(plain), level=number))

    def dispatch(self, step: StepRows | None, determine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What vLLM's `determine` says of a batch: the graph's mode, its descriptor, and more.

        A step that skips gets a graph of its level, or none and no padding: a graph of vLLM's own runs every layer.
        """
        level = self._capturing if step is None else self.level_of(step)
        if level is not None:
            mode, plain, *rest = determine(*args, **kwargs)
            key = DepthDescriptor(**asdict(plain), level=level)
            if mode == CUDAGraphMode.FULL and (step is None or key in self.captured):
                return (mode, key, *rest)
        return determine(*args, **kwargs | ({} if step is None else {"force_eager": True}))

    def level_of(self, step: StepRows) -> int | None:
        """The least level that serves a step that skips.

        None if there are no graphs, it projects prompt rows, or rows sit a layer out and do not take its bridge.
        """
        if not self.captured or any(kind != NONE for kind in step.projects):
            return None
        if any(step.rows_of(i) + step.rows_across(i) < step.num_rows for i in self._bridged):
            return None
        layers = frozenset(i for i, kind in enumerate(step.layers) if kind != NONE)
        fitting = [n for n, level in enumerate(self.levels) if level.serves(layers, not step.parts)]
        return min(fitting, key=lambda n: len(self.levels[n].layers), default=None)

    def fill(self, step: StepRows, descriptor: DepthDescriptor) -> None:
        """Get `keep` ready for a replay, on the stream of the replay."""
        if step is self._filled or not self.levels[descriptor.level].masked:
            return
        runs = torch.from_numpy(step.mask(descriptor.num_tokens))
        # New pinned memory every time: the copy of the step before may still be under way.
        self.keep[: len(runs)].copy_(runs.pin_memory() if self.keep.is_cuda else runs, non_blocking=True)
        self._filled = step
