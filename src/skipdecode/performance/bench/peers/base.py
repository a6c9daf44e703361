"""What an engine under measurement is to the benchmark: sizes in, seconds of the decode steps and bytes read out.

A step's time does not depend on what a cache holds, only on how much. So a timed run computes no prompt, and the
caches behind it are filled with made-up keys and values; only drafting methods, whose speed depends on the text, get a
real one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from skipdecode.performance.cost import CostModel, Machine
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.schedule import Schedule

__all__ = ["Peer"]


class Peer(ABC):
    """An engine under measurement, greedy, without an end token.

    Parameters
    ----------
    model : transformers causal LM
        Whose weights it runs.

    Attributes
    ----------
    name : str
        Of its rows.
    weights : str
        Type in which it reads the weights.
    skips : bool
        Whether it can run schedules; if not, it is measured at full depth only.
    max_batch : int or None
        Most rows that it decodes together; None for any number.
    """

    name: str
    skips: bool = False
    max_batch: int | None = None

    def __init__(self, model: Any) -> None:
        self.weights = str(model.dtype).removeprefix("torch.")
        self._geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)

    def suited(self, schedule: Schedule) -> Schedule:
        """The schedule that it runs where it is asked for `schedule`."""
        return schedule

    @abstractmethod
    def prepare(self, batch: int, prompt: int, new: int) -> None:
        """Make ready for runs of these sizes; not timed."""

    @abstractmethod
    def decode_seconds(self, schedule: Schedule) -> float:
        """Seconds of the `new` - 1 steps behind the prompt, all of the batch's rows in each."""

    def reads(self, batch: int) -> CostModel:
        """What a step of `batch` rows must read, as a cost model whose seconds are bytes."""
        return CostModel.predicted(self._geometry, Machine(1.0), batch)

    def step_bytes(self, schedule: Schedule, batch: int, prompt: int, new: int) -> float:
        """Mean bytes that a step must read in the run that `prepare` and `decode_seconds` describe."""
        return self.reads(batch).sequence_seconds(schedule, prompt, new) / (new - 1)

    def mean_layers(self, schedule: Schedule, steps: int) -> float:
        """Mean layers that a step runs."""
        return schedule.mean_budget(steps)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give back what is not Python's to collect."""
