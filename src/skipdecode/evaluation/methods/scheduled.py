"""Any nested schedule: SkipDecode, early termination, Unified Layer Skipping, D3, static pruning, calibrated ones.

Decoded by the engine that is asked for; without one, through transformers with gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from skipdecode.engine.base import Engine
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.opening import Backend, open_engines
from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.base import Method, Untouched
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = ["Full", "Scheduled", "off_engine", "on_engine"]


class Scheduled(Method):
    """The model under a schedule; rows that end leave the batch.

    Parameters
    ----------
    schedule : Schedule or None
        For a model of its number of layers; None: full depth, of any.
    source : Backend, optional
        Engines of the model that is decoded.
    """

    def __init__(self, schedule: Schedule | None, source: Backend | None = None) -> None:
        self.schedule, self._source = schedule, source
        self.name = "full" if schedule is None else schedule.name
        self.engine = GatedEngine.name if source is None else source.name

    def on(self, source: Backend) -> Scheduled:
        """The same, decoded by the engines of a model."""
        return Scheduled(self.schedule, source)

    def make_engine(self, model: Any, max_rows: int) -> Engine:
        schedule = self.schedule or Schedule.full(len(decoder_layers(unwrap(model))))
        if self._source is None:
            return GatedEngine(model, schedule, max_rows=max_rows)
        return self._source.engine(schedule, max_rows=max_rows)

    def settings(self) -> dict[str, Any]:
        """The name, and the schedule itself."""
        return super().settings() | ({} if self.schedule is None else {"schedule": self.schedule.to_dict()})

    def check_shape(self, model_type: str, num_layers: int) -> None:
        """Raises ScheduleError if the schedule is for another number of layers."""
        if self.schedule is not None:
            self.schedule.check_fits(num_layers)


class Full(Scheduled):
    """Every layer for every token: the yardstick of all schedules on the same engine."""

    full_depth = True

    def __init__(self, source: Backend | None = None) -> None:
        super().__init__(None, source)

    def on(self, source: Backend) -> Full:
        return Full(source)


def on_engine(
    methods: Sequence[Method], model: Any, engine: str, note: Callable[[str], None], quantization: str = "none"
) -> tuple[list[Method], tuple[Method, ...]]:
    """Methods on the engine that is asked for, where it can run them, and full depth on each engine that is used.

    `methods` are as made, schedules through transformers; `note` is told one line where the choice needs a word;
    `engine` and `quantization` are as in `skipdecode.engine.opening.open_fast`. Raises a SkipDecodeError for a method
    that does not fit the model, or if `engine` is "fast" and cannot run the model or a method.
    """
    for method in methods:
        method.check(model)
    others = off_engine(methods, engine)
    if len(others) == len(methods):
        return list(methods), (Untouched(),)
    source = open_engines(model, engine, note, quantization)
    if others:
        note(f"{', '.join(others)}: no schedule, so it runs through transformers, next to full depth there")
    bound = [m.on(source) if isinstance(m, Scheduled) else m for m in methods]
    return bound, (Full(source), Untouched())


def off_engine(methods: Sequence[Method], engine: str) -> list[str]:
    """Names of methods that run through transformers, being no schedule; UsageError if `engine` is "fast"."""
    others = [m.name for m in methods if not isinstance(m, Scheduled)]
    if others and engine == "fast":
        raise UsageError(f"--engine fast does not run {', '.join(others)}: give --engine auto")
    return others
