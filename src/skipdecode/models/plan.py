"""What each layer does with the tokens of one forward: from generation positions to a count of leading tokens.

Along a row the positions never fall, so the tokens that run a layer are always the first ones of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.schedule import Schedule

__all__ = [
    "AFTER",
    "PROMPT",
    "LayerPlan",
    "StepPlan",
    "cached_positions",
    "check_prompt_length",
    "label_positions",
    "length_positions",
]

PROMPT = -1
"""Position of a prompt token."""

AFTER = 2**40
"""Position of every token that comes after the first response: it runs the schedule's last set."""


@dataclass(frozen=True)
class LayerPlan:
    """What one layer does: it runs on the first `count` columns; `keep` (batch, count) marks the tokens it is for.

    `keep` is None where all of them are, which is always so in decoding. A ragged teacher-forced batch is the one case
    in which a row's columns beyond its own count are computed, with the rest of the layer's rows.
    """

    count: int
    keep: Tensor | None = None


@dataclass(frozen=True)
class StepPlan:
    """The plan of one forward over `columns` columns: one `LayerPlan` per decoder layer."""

    columns: int
    layers: tuple[LayerPlan, ...]

    @cached_property
    def token_layers(self) -> int:
        """Sum over layers of the columns that run them."""
        return sum(layer.count for layer in self.layers)

    @classmethod
    def of_columns(cls, schedule: Schedule, positions: list[int]) -> StepPlan:
        """Plan for rows in lockstep; `positions` holds the generation position of each column."""
        depth = [_effective(schedule, p) for p in positions]
        counts = [_first(depth, schedule.drop_position(layer)) for layer in range(schedule.num_layers)]
        return cls(len(positions), tuple(LayerPlan(c) for c in counts))

    @classmethod
    def of_rows(cls, schedule: Schedule, positions: Tensor) -> StepPlan:
        """Plan for rows of their own; `positions` (batch, columns) of whole numbers, non-decreasing along a row."""
        if schedule.prompt == "max_exit":
            positions = positions.clamp(min=0)
        columns = positions.shape[1]
        drops = [schedule.drop_position(layer) for layer in range(schedule.num_layers)]
        limits = torch.tensor([AFTER + 1 if d is None else d for d in drops], device=positions.device)
        active = positions < limits[:, None, None]
        counts = active.sum(-1).tolist()  # one transfer for all layers
        return cls(columns, tuple(_row_plan(c, a) for c, a in zip(counts, active, strict=True)))


def _effective(schedule: Schedule, position: int) -> int:
    """The position whose layers a token runs: a prompt at `max_exit` runs those of position 0."""
    return max(position, 0) if schedule.prompt == "max_exit" else position


def _first(depth: list[int], drop: int | None) -> int:
    if drop is None:
        return len(depth)
    return next((i for i, position in enumerate(depth) if position >= drop), len(depth))


def _row_plan(counts: list[int], active: Tensor) -> LayerPlan:
    most = max(counts)
    return LayerPlan(most, None if most == min(counts) else active[:, :most])


def label_positions(labels: Tensor) -> Tensor:
    """Positions (batch, columns) from training labels (batch, columns), where -100 marks what is not response.

    Response token j of a row is position j; tokens before it are prompt; everything after the first response segment
    (later turns) is `AFTER`, as in cached decoding.
    """
    response = labels != -100
    count = response.cumsum(1)
    # Positions that a response token follows directly: a gap after a response ends the first segment.
    gap = (~response & (count > 0)).cumsum(1) > 0
    return torch.where(gap, AFTER, count - 1)


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
        return [0] if past and columns == 1 else [PROMPT] * columns
    return [max(PROMPT, past + i - prompt_length) for i in range(columns)]
