"""What each layer does with the tokens of one forward: from generation positions to the columns that run.

Along a row the positions never fall, so the tokens that run a layer stand together: the first ones of the row, or, for
a layer that prompts do not run, those from the last prompt token on. What is before them is projected: the layer stores
their keys and values and does nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.schedule import Schedule

__all__ = [
    "AFTER",
    "LAST_PROMPT",
    "PROMPT",
    "LayerPlan",
    "StepPlan",
    "cached_positions",
    "check_prompt_length",
    "label_positions",
    "length_positions",
]

PROMPT = -2
"""Position of a prompt token, the last one apart."""

LAST_PROMPT = -1
"""Position of the last prompt token, from which the first new token is predicted."""

AFTER = 2**40
"""Position of every token that comes after the first response: it runs the schedule's last set."""


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does: nothing with columns from `count` on, and before them it runs from column `start` on.

    Columns before `start` are projected: keys and values are stored, the states pass by. `keep` (batch, count - start)
    marks the tokens that the layer is for; None where all of them are, which is always so in decoding. A ragged
    teacher-forced batch is the one case in which columns beyond a row's own are computed, with the layer's other rows.

    Tokens that skip the layer from column `bridged` on take its bridge, where a fit has one (`skipdecode.models.fit`);
    `crosses` (batch, columns - bridged) marks them where rows differ. Prompt tokens do so only with prompt "max_exit",
    the last one apart: with layers of their own they pass the others by.
    """

    count: int
    start: int = 0
    keep: Tensor | None = None
    bridged: int = AFTER
    crosses: Tensor | None = None


@dataclass(frozen=True)
class StepPlan:
    """The plan of one forward over `columns` columns: one `LayerPlan` per decoder layer."""

    columns: int
    layers: tuple[LayerPlan, ...]

    @cached_property
    def token_layers(self) -> int:
        """Sum over layers of the columns that run them."""
        return sum(layer.count - layer.start for layer in self.layers)

    @classmethod
    def of_columns(cls, schedule: Schedule, positions: list[int]) -> StepPlan:
        """Plan for rows in lockstep; `positions` holds the generation position of each column."""
        plans = []
        for first, end, skipped in zip(*_bounds(schedule), strict=True):
            count = bisect_left(positions, end)
            start = min(count, bisect_left(positions, first))
            plans.append(LayerPlan(count, start, bridged=bisect_left(positions, skipped)))
        return cls(len(positions), tuple(plans))

    @classmethod
    def of_rows(cls, schedule: Schedule, positions: Tensor) -> StepPlan:
        """Plan for rows of their own; `positions` (batch, columns) of whole numbers, non-decreasing along a row."""
        bounds = (torch.tensor(bound, device=positions.device)[:, None, None] for bound in _bounds(schedule))
        first, end, skipped = bounds
        before, active, crosses = positions < first, positions < end, positions >= skipped
        ends = torch.stack((before.sum(-1), active.sum(-1), (~crosses).sum(-1))).tolist()  # one transfer for all layers
        active &= ~before
        return cls(positions.shape[1], tuple(map(_row_plan, *ends, active, crosses)))


def _bounds(schedule: Schedule) -> tuple[list[int], list[int], list[int]]:
    """For each layer the positions from which it runs, from which it does no more, and from which its bridge serves."""
    on_prompt, at_last = set(schedule.prompt_layers()), set(schedule.last_prompt_layers())
    first = [LAST_PROMPT if layer in at_last - on_prompt else PROMPT for layer in range(schedule.num_layers)]
    end, skipped = [], []
    for layer in range(schedule.num_layers):
        drop = schedule.drop_position(layer)
        end.append((AFTER + 1 if drop is None else drop) if layer in at_last else PROMPT)
        skipped.append(end[-1] if layer in at_last else PROMPT if schedule.prompt == "max_exit" else LAST_PROMPT)
    return first, end, skipped


def _row_plan(starts: list[int], counts: list[int], bridged: list[int], active: Tensor, crosses: Tensor) -> LayerPlan:
    start, count, bridge = min(starts), max(counts), min(bridged)
    across = None if bridge == max(bridged) else crosses[:, bridge:]
    if start == max(starts) and count == min(counts):
        return LayerPlan(count, min(start, count), None, bridge, across)
    return LayerPlan(count, start, active[:, start:count], bridge, across)


def label_positions(labels: Tensor) -> Tensor:
    """Positions (batch, columns) from training labels (batch, columns), where -100 marks what is not response.

    Response token j of a row is position j; tokens before it are prompt; everything after the first response segment
    (later turns) is `AFTER`, as in cached decoding.
    """
    response = labels != -100
    count = response.cumsum(1)
    follows = response.roll(-1, 1)
    follows[:, -1] = False
    before = torch.where(follows, LAST_PROMPT, PROMPT)
    # Positions that a response token follows directly: a gap after a response ends the first segment.
    gap = (~response & (count > 0)).cumsum(1) > 0
    return torch.where(gap, AFTER, torch.where(count == 0, before, count - 1))


def check_prompt_length(value: Any, columns: int, past: Any) -> None:
    """Raise UnsupportedFeatureError unless `value` can be the prompt's columns: whole, 0 or more, one if cached."""
    numbers = value.tolist() if isinstance(value, Tensor) else [value]
    numbers = numbers if isinstance(numbers, list) else [numbers]
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in numbers):
        raise UnsupportedFeatureError(f"prompt_length={value!r} is not accepted: give whole numbers of 0 or more")
    if past is not None and len(numbers) > 1:
        raise UnsupportedFeatureError("prompt_length with a cache is one number: the rows of a cache are in lockstep")
    if past is None and max(numbers) > columns:
        raise UnsupportedFeatureError(f"prompt_length={max(numbers)} is more than the input's {columns} columns")


def length_positions(prompt_length: int | Tensor, batch: int, columns: int, device: torch.device) -> Tensor:
    """Positions (batch, columns) when the first `prompt_length` columns (one number, or one a row) are prompt."""
    lengths = torch.as_tensor(prompt_length, device=device).reshape(-1, 1)
    if lengths.shape[0] not in (1, batch):
        raise UnsupportedFeatureError(
            f"prompt_length has {lengths.shape[0]} values for a batch of {batch}: give one number, or one for each row"
        )
    columns_index = torch.arange(columns, device=device).expand(batch, -1)
    return (columns_index - lengths).clamp(min=PROMPT)


def cached_positions(columns: int, *, past: int, prompt_length: int | None, fed: int | None) -> list[int]:
    """Positions of the next `columns` columns of a cache that holds `past` columns.

    `fed` counts the generated columns among them; None while the first response has not begun. A forward after it has
    begun is one generated token, or a new turn: its first token is the last generated one, which had not been fed yet,
    and takes the next position; the rest run the last set, and so does everything after them. A first forward that runs
    past `prompt_length` is teacher-forced.
    """
    if fed is not None:
        return [min(fed, AFTER)] + [AFTER] * (columns - 1)
    if prompt_length is None:
        # By hand, without a stated prompt length: one token on a filled cache is generated, anything else is prompt.
        return [0] if past and columns == 1 else [PROMPT] * (columns - 1) + [LAST_PROMPT]
    return [max(PROMPT, past + i - prompt_length) for i in range(columns)]
