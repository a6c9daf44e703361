"""What a benchmark decodes: batches, lengths, nominal speed-ups. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.errors import UsageError
from skipdecode.schedule import Schedule

__all__ = ["Workload"]


@dataclass(frozen=True)
class Workload:
    """Rows that start together and take `new` tokens each.

    Parameters
    ----------
    batches : tuple of int
        Rows of a batch.
    prompts : tuple of int
        Tokens in the cache of a row when its first new token is fed back, 2 or more each.
    new : int
        New tokens of a row: `new` - 1 decode steps.
    nominal : tuple of float
        Nominal speed-ups; full depth (1) is always among those measured.
    rounds : int
        Times that everything runs, in turn.
    """

    batches: tuple[int, ...] = (1, 8)
    prompts: tuple[int, ...] = (64,)
    new: int = 128
    nominal: tuple[float, ...] = (1.0, 2.0, 3.0, 5.0)
    rounds: int = 3

    def __post_init__(self) -> None:
        for name, values, fine, accepted in (
            ("batches", self.batches, all(b >= 1 for b in self.batches), "1 or more"),
            ("prompt", self.prompts, all(p >= 2 for p in self.prompts), "2 or more"),
            ("new", self.new, self.new >= 3, "3 or more"),
            ("nominal", self.nominal, all(n >= 1 for n in self.nominal), "1 or more"),
            ("rounds", self.rounds, self.rounds >= 1, "1 or more"),
        ):
            if not fine:
                raise UsageError(f"--{name} {values} is not accepted: give {accepted}")

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Rows and prompt tokens of each cell of the table."""
        return [(batch, prompt) for batch in dict.fromkeys(self.batches) for prompt in dict.fromkeys(self.prompts)]

    @property
    def steps(self) -> int:
        """Decode steps."""
        return self.new - 1

    def schedules(self, num_layers: int) -> dict[float, Schedule]:
        """The paper's schedule for each nominal speed-up, full depth first."""
        return {1.0: Schedule.full(num_layers)} | {
            n: Schedule.from_speedup(num_layers, n, self.steps) for n in sorted(set(self.nominal)) if n > 1
        }
