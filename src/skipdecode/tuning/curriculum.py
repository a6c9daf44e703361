"""Which schedule a training step runs under. Pure Python; a function of the step alone, so a resumed run repeats it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Protocol

from skipdecode.errors import ScheduleError
from skipdecode.schedule import Schedule
from skipdecode.tuning.config import TuneConfig

__all__ = ["Curriculum", "Fixed", "Lower", "Random", "Sampled", "make_curriculum"]


class Curriculum(Protocol):
    """What a training run asks."""

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """Schedules that the tuned model is for; the dev loss is their mean."""
        ...

    def schedule_at(self, step: int) -> Schedule:
        """The schedule of optimizer step `step` (0-based)."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The target from the first step to the last."""

    target: Schedule

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """The target."""
        return (self.target,)

    def schedule_at(self, step: int) -> Schedule:
        """The target, whatever the step."""
        return self.target


@dataclass(frozen=True)
class Lower:
    """From full depth down to the target over `steps` steps, then the target.

    Each budget moves in a straight line from all layers to the target's; rounding keeps the budgets non-increasing
    because it is the same monotone map at every position.
    """

    target: Schedule
    steps: int

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """The target."""
        return (self.target,)

    def schedule_at(self, step: int) -> Schedule:
        """The schedule of step `step`: full depth at step 0 (unless `steps` is 0), the target from `steps` on."""
        if step >= self.steps:
            return self.target
        layers = self.target.num_layers
        budgets = tuple(layers - (layers - b) * step // self.steps for b in self.target.budgets)
        return replace(self.target, budgets=budgets, name=f"{self.target.name}-{step}/{self.steps}")


@dataclass(frozen=True)
class Sampled:
    """Each step one of `schedules`, drawn with equal chances from (`seed`, step)."""

    schedules: tuple[Schedule, ...]
    seed: int

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """All of the schedules."""
        return self.schedules

    def schedule_at(self, step: int) -> Schedule:
        """The schedule drawn for step `step`."""
        # A generator of its own per step: no state to save, and no other draw shifts it.
        return random.Random(f"{self.seed}/{step}").choice(self.schedules)


@dataclass(frozen=True)
class Random:
    """Each step other layers are left out of the response, as many as the draw says, from (`seed`, step).

    From none to as many as `target` leaves out at its end; its warm-up layers and the last layer always run. Source:
    LayerDrop, arXiv 1909.11556. The weights that come of it bear any order, so a calibration on them compares orders
    for what tuning cannot mend.
    """

    target: Schedule
    seed: int

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """The target."""
        return (self.target,)

    def schedule_at(self, step: int) -> Schedule:
        """A flat schedule drawn for step `step`."""
        target, draw = self.target, random.Random(f"{self.seed}/{step}")
        layers = target.num_layers
        order = draw.sample(range(target.warmup_layers, layers - 1), layers - 1 - target.warmup_layers)
        depth = draw.randint(target.budgets[-1], layers)
        return Schedule.constant(
            layers,
            depth,
            drop_order=order,
            warmup_layers=target.warmup_layers,
            prompt=target.prompt,
            name=f"random-{depth}",
        )


def make_curriculum(target: Schedule, config: TuneConfig) -> Curriculum:
    """The curriculum that `config` asks for."""
    if config.curriculum == "lower":
        return Lower(target, round(config.steps * config.curriculum_fraction))
    if config.curriculum == "none":
        return Fixed(target)
    if config.curriculum == "random":
        return Random(target, config.seed)
    schedules = [target]
    for speedup in config.sampled_speedups:
        schedule = target.with_speedup(speedup)
        if schedule.budgets != target.budgets:
            schedules.append(schedule)
    if len(schedules) == 1:
        raise ScheduleError("sampled budgets need a second schedule: give --sampled-speedups other than the target's")
    return Sampled(tuple(schedules), config.seed)
