"""What a benchmark decodes: batches, lengths, nominal speed-ups. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.common.options import Options, option
from skipdecode.schedule import Schedule

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload(Options):
    """Rows that start together and take `new` tokens each: `new` - 1 decode steps.

    `prompt` counts the tokens in the cache of a row when its first new token is fed back.
    """

    batches: tuple[int, ...] = option("rows decoded together, one or more values", default=(1, 8), least=1)
    prompt: tuple[int, ...] = option("prompt tokens of a row, one or more values", default=(64,), least=2)
    new: int = option("new tokens of a row", default=128, least=3)
    nominal: tuple[float, ...] = option(
        "nominal speed-ups; 1, full depth, is always run", default=(1.0, 2.0, 3.0, 5.0), least=1
    )
    rounds: int = option("times that everything runs, in turn", default=3, least=1)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and prompt tokens of each cell of the table."""
        return [(batch, prompt) for batch in dict.fromkeys(self.batches) for prompt in dict.fromkeys(self.prompt)]

    @property
    def steps(self) -> int:
        """Decode steps."""
        return self.new - 1

    def schedules(self, num_layers: int) -> dict[float, Schedule]:
        """The paper's schedule for each nominal speed-up, full depth first."""
        return {1.0: Schedule.full(num_layers)} | {
            n: Schedule.from_speedup(num_layers, n, self.steps) for n in sorted(set(self.nominal)) if n > 1
        }
