"""What a step costs by the number of rows in each layer, for the simulator. Pure Python.

`CostModel` holds one batch size. In a stream the rows of a step come and go and layers have different rows, so the
simulator needs every count: interpolated between cost models measured at several batch sizes, or predicted for each.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from skipdecode.errors import UsageError
from skipdecode.performance.cost import CostModel, Machine
from skipdecode.performance.geometry import ModelGeometry

__all__ = ["BatchCost", "StepCost"]

_PROMPT_TOKENS = 512  # of one forward, as in the engine: what a mixture of experts is read for


class StepCost(Protocol):
    """What the simulator asks of a cost. All layers cost the same; a layer that no row runs costs nothing."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""

    @property
    def max_rows(self) -> int:
        """Most rows for which the cost is known."""

    def fixed_seconds(self, rows: int) -> float:
        """A step of `rows` rows outside its layers."""

    def layer_seconds(self, rows: int) -> float:
        """One layer on `rows` rows, without the cache read."""

    def kv_seconds(self, rows: int) -> float:
        """Reading one cached token of one row, in a layer on `rows` rows."""

    def prompt_seconds(self, tokens: int, layers: int) -> float:
        """One forward over `tokens` tokens of prompts through `layers` layers."""

    @property
    def window(self) -> int:
        """Tokens that sliding-window attention sees; 0 without any."""

    @property
    def window_share(self) -> float:
        """Share of the layers that have it."""


@dataclass(frozen=True)
class BatchCost:
    """A `StepCost` in tables.

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    fixed, layer, kv : tuple of float
        Seconds by the number of rows less 1; see `StepCost`.
    prompt_layer_seconds : float
        Least time of one layer in a prompts' forward: the read of its weights.
    prompt_token_seconds : float
        One prompt token in one layer. Attention inside the prompt is not counted on top.
    window, window_share : int, float
        See `CostModel`.
    prompt_points : tuple of (int, float), optional
        Measured: prompt tokens of a forward and the seconds of one layer on them, rising. Straight lines between them
        and on beyond the last stand in place of the two figures for prompts.
    """

    num_layers: int
    fixed: tuple[float, ...]
    layer: tuple[float, ...]
    kv: tuple[float, ...]
    prompt_layer_seconds: float
    prompt_token_seconds: float
    window: int = 0
    window_share: float = 0.0
    prompt_points: tuple[tuple[int, float], ...] = ()

    @classmethod
    def between(
        cls, models: Sequence[CostModel], max_rows: int | None = None, prompt_token_seconds: float | None = None
    ) -> Self:
        """Straight lines between cost models of one model at several batch sizes.

        Below the smallest batch a step is taken to cost what that batch does (its weights must be read all the same),
        but for the cache read.

        Parameters
        ----------
        models : sequence of CostModel
            At different batch sizes.
        max_rows : int, optional
            Rows to know the cost of; at most the largest batch, the default.
        prompt_token_seconds : float, optional
            One prompt token in one layer. Default: what a row of the largest batch costs, which is an upper bound.

        Raises
        ------
        UsageError
            If `max_rows` is above the largest batch, or the models differ in layers or share a batch size.
        """
        known = sorted(models, key=lambda m: m.batch)
        if not known:
            raise UsageError("no cost model was given: give one or more")
        batches, largest = [m.batch for m in known], known[-1]
        if len({m.num_layers for m in known}) > 1 or len(set(batches)) < len(known):
            raise UsageError(
                f"cost models of {[m.num_layers for m in known]} layers at batches {batches} do not go together: give "
                "one model's, at different batch sizes"
            )
        rows = largest.batch if max_rows is None else max_rows
        if not 1 <= rows <= largest.batch:
            raise UsageError(
                f"max_rows={rows} is not accepted: the cost is known for 1 to {largest.batch} rows; measure a larger "
                "batch for more"
            )
        if prompt_token_seconds is None:
            prompt_token_seconds = largest.layer_seconds / largest.batch
        elif not 0 <= prompt_token_seconds < math.inf:
            raise UsageError(f"prompt_token_seconds={prompt_token_seconds!r} is not accepted: give seconds, 0 or more")
        counts = range(1, rows + 1)
        layer = _lines(batches, [m.layer_seconds for m in known], counts)
        return cls(
            num_layers=largest.num_layers,
            fixed=_lines(batches, [m.fixed_seconds for m in known], counts),
            layer=layer,
            kv=_lines(batches, [m.kv_seconds / m.batch for m in known], counts),
            prompt_layer_seconds=layer[0],
            prompt_token_seconds=prompt_token_seconds,
            window=largest.window,
            window_share=largest.window_share,
        )

    @classmethod
    def measured(
        cls, num_layers: int, steps: Mapping[int, tuple[float, float, float]], prompts: Mapping[int, float]
    ) -> Self:
        """Straight lines between measurements.

        Parameters
        ----------
        num_layers : int
        steps : mapping
            By the number of rows: seconds of a decode step outside its layers, of one layer, and of reading one cached
            token of one row in a layer.
        prompts : mapping
            By the prompt tokens of a forward: seconds of one layer.

        Raises
        ------
        UsageError
            If either is empty.
        """
        if not steps or not prompts:
            raise UsageError("a measured cost needs one number of rows and one prompt length or more")
        batches, found = sorted(steps), [steps[rows] for rows in sorted(steps)]
        counts = range(1, batches[-1] + 1)
        fixed, layer, kv = (_lines(batches, [each[i] for each in found], counts) for i in range(3))
        points = tuple(sorted(prompts.items()))
        return cls(num_layers, fixed, layer, kv, points[0][1], points[-1][1] / points[-1][0], prompt_points=points)

    @classmethod
    def predicted(cls, geometry: ModelGeometry, machine: Machine, max_rows: int) -> Self:
        """From bytes and FLOPs, for every number of rows (`CostModel.predicted`)."""
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows} is not accepted: give 1 or more")
        models = [CostModel.predicted(geometry, machine, rows) for rows in range(1, max_rows + 1)]
        return cls(
            num_layers=geometry.num_layers,
            fixed=tuple(m.fixed_seconds for m in models),
            layer=tuple(m.layer_seconds for m in models),
            kv=tuple(m.kv_seconds / m.batch for m in models),
            prompt_layer_seconds=machine.seconds(geometry.layer_bytes(_PROMPT_TOKENS), 0) + machine.launch_seconds,
            prompt_token_seconds=machine.seconds(0, geometry.layer_flops()),
            window=models[0].window,
            window_share=models[0].window_share,
        )

    @property
    def max_rows(self) -> int:
        """Most rows for which the cost is known."""
        return len(self.layer)

    def fixed_seconds(self, rows: int) -> float:
        """See `StepCost`."""
        return self.fixed[rows - 1]

    def layer_seconds(self, rows: int) -> float:
        """See `StepCost`."""
        return self.layer[rows - 1]

    def kv_seconds(self, rows: int) -> float:
        """See `StepCost`."""
        return self.kv[rows - 1]

    def prompt_seconds(self, tokens: int, layers: int) -> float:
        """See `StepCost`."""
        return self.fixed[0] + layers * self._prompt_layer(tokens)

    def _prompt_layer(self, tokens: int) -> float:
        points = self.prompt_points
        if not points:
            return max(self.prompt_layer_seconds, tokens * self.prompt_token_seconds)
        if tokens > points[-1][0]:
            return points[-1][1] * tokens / points[-1][0]
        return _lines([count for count, _ in points], [seconds for _, seconds in points], range(tokens, tokens + 1))[0]


def _lines(batches: list[int], values: list[float], counts: range) -> tuple[float, ...]:
    """Values at `counts` on straight lines through (batch, value); level before the first."""
    found = []
    for rows in counts:
        right = bisect.bisect_left(batches, rows)
        if right == 0 or batches[right] == rows:
            found.append(values[right])
            continue
        share = (rows - batches[right - 1]) / (batches[right] - batches[right - 1])
        found.append(values[right - 1] + share * (values[right] - values[right - 1]))
    return tuple(found)
