"""Any nested schedule: SkipDecode, early termination, Unified Layer Skipping, D3, static pruning, calibrated ones."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from skipdecode.evaluation.methods.base import Timed
from skipdecode.models.attach import attach
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = ["Scheduled"]


class Scheduled(Timed):
    """The model under a schedule.

    Parameters
    ----------
    schedule : Schedule
        For a model of its number of layers.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule: Schedule = schedule
        self.name = schedule.name
        self.lossless = schedule.is_full

    def session(self, model: Any, eos: set[int]) -> AbstractContextManager[Any]:
        """The schedule, attached."""
        return attach(model, self.schedule)

    def layer_tokens(self, rows: list[list[int]], prompt_tokens: int, num_layers: int, session: Any) -> int:
        """By the schedule, row by row."""
        return sum(self.schedule.budget(i) for row in rows for i in range(len(row) - 1))

    def settings(self) -> dict[str, Any]:
        """The schedule itself."""
        return {"name": self.name, "schedule": self.schedule.to_dict()}

    def check(self, model: Any) -> None:
        """Raises ScheduleError if the schedule is for another number of layers."""
        self.schedule.check_fits(len(decoder_layers(unwrap(model))))
