"""The plan of a forward: for each layer, the columns that run, from the generation positions of the tokens.

Positions never fall along a row, so the tokens that run a layer are contiguous. They are the first tokens of the row,
or, for a layer that prompts skip, the tokens from the last prompt token on. The tokens before these are projected: the
layer stores their keys and values and does nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from skipdecode.common.plain import unwrapped
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.schedule import Schedule

PROMPT = -2
"""Position of a prompt token, except the last."""

LAST_PROMPT = -1
"""Position of the last prompt token, from which the first new token is predicted."""

AFTER = 2**40
"""Position of every token after the first response; such a token runs the schedule's last set."""


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer: it runs on the columns from `start` up to `count`, and skips those from `count` on.

    Columns before `start` are projected: their keys and values are stored, and their states pass unchanged. `keep`
    (batch, count - start) marks the tokens that run the layer; None if all do, which is always so in decoding. Only in
    a ragged teacher-forced batch does the layer compute columns that a row does not need, because other rows need them.

    Tokens that skip the layer from column `bridged` on take its bridge, if a fit has one (`skipdecode.models.fit`).
    `crosses` (batch, columns - bridged) marks them if rows differ. Prompt tokens except the last take bridges only with
    prompt "max_exit".
    """

    count: int
    start: int = 0
    keep: Tensor | None = None
    bridged: int = AFTER
    crosses: Tensor | None = None

    def after(self, columns: int) -> LayerPlan:
        """The plan for a layer that is not given the first `columns` columns."""
        if columns == 0:
            return self
        keep = None if self.keep is None else self.keep[:, max(columns - self.start, 0) :]
        crosses = None if self.crosses is None else self.crosses[:, max(columns - self.bridged, 0) :]
        return LayerPlan(
            max(self.count - columns, 0), max(self.start - columns, 0), keep, max(self.bridged - columns, 0), crosses
        )


@dataclass(frozen=True)
class StepPlan:
    """The plan of one forward over `columns` columns: one `LayerPlan` per decoder layer."""

    columns: int
    layers: tuple[LayerPlan, ...]

    @classmethod
    def of_columns(cls, schedule: Schedule, positions: list[int]) -> StepPlan:
        """Plan for rows with the same positions; `positions` has the generation position of each column."""
        plans = []
        for first, end, skipped in zip(*layer_bounds(schedule), strict=True):
            count = bisect_left(positions, end)
            start = min(count, bisect_left(positions, first))
            plans.append(LayerPlan(count, start, bridged=bisect_left(positions, skipped)))
        return cls(len(positions), tuple(plans))

    @classmethod
    def of_rows(cls, schedule: Schedule, positions: Tensor) -> StepPlan:
        """Plan for rows with different positions; `positions` (batch, columns) never fall along a row."""
        bounds = (torch.tensor(bound, device=positions.device)[:, None, None] for bound in layer_bounds(schedule))
        first, end, skipped = bounds
        before, active, crosses = positions < first, positions < end, positions >= skipped
        ends = torch.stack((before.sum(-1), active.sum(-1), (~crosses).sum(-1))).tolist()  # one transfer for all layers
        active &= ~before
        return cls(positions.shape[1], tuple(map(_row_plan, *ends, active, crosses)))


def layer_bounds(schedule: Schedule) -> tuple[list[int], list[int], list[int]]:
    """Positions at which each layer starts to run, stops running, and starts to use its bridge."""
    on_prompt, at_last = set(schedule.prompt_layers()), set(schedule.last_prompt_layers())
    first = [LAST_PROMPT if layer in at_last - on_prompt else PROMPT for layer in range(schedule.num_layers)]
    end, skipped = [], []
    for layer in range(schedule.num_layers):
        if layer in at_last:
            drop = schedule.drop_position(layer)
            end.append(AFTER + 1 if drop is None else drop)
            skipped.append(end[-1])
        else:
            end.append(PROMPT)
            skipped.append(PROMPT if schedule.prompt == "max_exit" else LAST_PROMPT)
    return first, end, skipped


def _row_plan(starts: list[int], counts: list[int], bridged: list[int], active: Tensor, crosses: Tensor) -> LayerPlan:
    start, count, bridge = min(starts), max(counts), min(bridged)
    across = None if bridge == max(bridged) else crosses[:, bridge:]
    if start == max(starts) and count == min(counts):
        return LayerPlan(count, min(start, count), None, bridge, across)
    return LayerPlan(count, start, active[:, start:count], bridge, across)


def label_positions(labels: Tensor) -> Tensor:
    """Positions (batch, columns) from training labels (batch, columns); -100 marks tokens outside the response.

    Response token j of a row has position j. Earlier tokens are prompt. All tokens after the first response segment
    (later turns) are `AFTER`, as in cached decoding.
    """
    response = labels != -100
    count = response.cumsum(1)
    follows = response.roll(-1, 1)
    follows[:, -1] = False
    before = torch.where(follows, LAST_PROMPT, PROMPT)
    # A gap after response tokens ends the first segment.
    gap = (~response & (count > 0)).cumsum(1) > 0
    return torch.where(gap, AFTER, torch.where(count == 0, before, count - 1))


def check_prompt_length(value: object, columns: int, past: object) -> None:
    """Raise UnsupportedFeatureError unless `value` is a number of prompt columns: whole, 0 or more, one if cached."""
    numbers = unwrapped(value)
    numbers = numbers if isinstance(numbers, list) else [numbers]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise UnsupportedFeatureError(f"prompt_length={value!r} is not accepted: give whole numbers of 0 or more")
    if past is not None and len(numbers) > 1:
        raise UnsupportedFeatureError("prompt_length with a cache is one number: the rows of a cache are in lockstep")
    if past is None and max(numbers) > columns:
        raise UnsupportedFeatureError(f"prompt_length={max(numbers)} is more than the input's {columns} columns")


def length_positions(prompt_length: int | Tensor, batch: int, columns: int, device: torch.device) -> Tensor:
    """Positions (batch, columns) if the first `prompt_length` columns (one number, or one per row) are prompt."""
    lengths = torch.as_tensor(prompt_length, device=device).reshape(-1, 1)
    if lengths.shape[0] not in (1, batch):
        raise UnsupportedFeatureError(
            f"prompt_length has {lengths.shape[0]} values for a batch of {batch}: give one number, or one for each row"
        )
    columns_index = torch.arange(columns, device=device).expand(batch, -1)
    return (columns_index - lengths).clamp(min=PROMPT)


def cached_positions(columns: int, *, past: int, prompt_length: int | None, fed: int | None) -> list[int]:
    """Positions of the next `columns` columns of a cache that holds `past` columns.

    `fed` is the number of generated columns in the cache; None before the first response. After the response has begun,
    a forward has one generated token or a new turn. The first token of a new turn is the last generated token, which
    was not fed yet; it takes the next position. The other tokens, and all later ones, run the last set. A first forward
    with more than `prompt_length` columns is teacher-forced.
    """
    if fed is not None:
        return [min(fed, AFTER)] + [AFTER] * (columns - 1)
    if prompt_length is None:
        # In a loop without a prompt length, one token on a filled cache is generated, and all else is prompt.
        return [0] if past and columns == 1 else [PROMPT] * (columns - 1) + [LAST_PROMPT]
    return [max(PROMPT, past + i - prompt_length) for i in range(columns)]
