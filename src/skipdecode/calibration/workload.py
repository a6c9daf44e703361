"""What a schedule costs on texts of given lengths. Pure Python.

Texts differ in length, so late positions are decoded less often than early ones, and a layer left out there saves less.
The share of texts that are still being generated is taken from the data: in lockstep a step is made while any of the
batch's rows goes on, in continuous use every row counts for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from skipdecode.errors import DataError
from skipdecode.performance.cost import CostModel, Use
from skipdecode.schedule import Schedule

__all__ = ["Workload", "layers_only"]


def layers_only(num_layers: int) -> CostModel:
    """A cost model that counts layers and nothing else: speed-up under it is the paper's nominal one."""
    return CostModel.of_step(num_layers, 1, 0.0, 1.0)


@dataclass(frozen=True)
class Workload:
    """A cost model with the texts that are decoded.

    Parameters
    ----------
    prompt_len : int
        Prompt tokens of a row.
    steps : tuple of float
        Expected decode steps at generation position 0, 1, … of a batch of texts.
    """

    cost: CostModel
    prompt_len: int
    steps: tuple[float, ...]

    @classmethod
    def of_lengths(cls, cost: CostModel, prompt_len: int, lengths: Sequence[int], use: Use = "lockstep") -> Self:
        """From the texts' lengths in generated tokens, end token included; rows of a batch are drawn independently.

        Raises
        ------
        DataError
            If no text has a decode step: two tokens are the least.
        """
        longest = max(lengths, default=0)
        if longest < 2:
            raise DataError(
                "no response has two tokens or more: there is no decode step whose layers could be left out"
            )
        going_on = [sum(length > position + 1 for length in lengths) / len(lengths) for position in range(longest - 1)]
        rows = cost.batch if use == "lockstep" else 1
        return cls(cost, prompt_len, tuple(1 - (1 - share) ** rows for share in going_on))

    def seconds_at(self, position: int, budget: int) -> float:
        """Expected seconds of the steps at one position if they run `budget` layers."""
        return self.steps[position] * self.cost.step_seconds(budget, self.prompt_len + position + 1)

    def seconds(self, schedule: Schedule) -> float:
        """Expected seconds of the decode phase."""
        schedule.check_fits(self.cost.num_layers)
        return sum(self.seconds_at(position, schedule.budget(position)) for position in range(len(self.steps)))

    def speedup(self, schedule: Schedule) -> float:
        """Speed-up of the decode phase over full depth."""
        return self.full_seconds / self.seconds(schedule)

    def mean_layers(self, schedule: Schedule) -> float:
        """Layers that a step runs, on average."""
        listed = (count * schedule.budget(position) for position, count in enumerate(self.steps))
        return sum(listed) / sum(self.steps)

    @cached_property
    def full_seconds(self) -> float:
        """Expected seconds of the decode phase at full depth."""
        return self.seconds(Schedule.full(self.cost.num_layers))
