"""Which schedule a training step runs under. Pure Python; a function of the step alone, so a resumed run repeats it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from skipdecode.learning.config import TuneConfig
from skipdecode.models.loading.recipe import sampled_schedules
from skipdecode.schedule import Schedule


@dataclass(frozen=True)
class Curriculum:
    """Each step the target or one of the others, drawn from (`seed`, step); twice as often where it is there twice."""

    target: Schedule
    others: tuple[Schedule, ...]
    seed: int

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """Schedules that the tuned model is for, the target first; the dev loss is their mean."""
        return tuple(dict.fromkeys((self.target, *self.others)))

    def schedule_at(self, step: int) -> Schedule:
        """The schedule of optimizer step `step` (0-based)."""
        # A generator of its own per step: no state to save, and no other draw shifts it.
        return random.Random(f"{self.seed}/{step}").choice((self.target, *self.others))


def make_curriculum(target: Schedule, config: TuneConfig) -> Curriculum:
    """The curriculum that `config` asks for."""
    return Curriculum(target, sampled_schedules(target, config.sampled_speedups, config.sampled_prompts), config.seed)
