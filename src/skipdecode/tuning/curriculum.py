"""Which schedule a training step runs under. Pure Python; a function of the step alone, so a resumed run repeats it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from skipdecode.errors import ScheduleError
from skipdecode.models.loading.recipe import sampled_schedules
from skipdecode.schedule import Schedule
from skipdecode.tuning.config import TuneConfig

__all__ = ["Curriculum", "Lower", "Sampled", "make_curriculum"]


@dataclass(frozen=True)
class Curriculum:
    """The target from the first step to the last; others start elsewhere."""

    target: Schedule

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """Schedules that the tuned model is for; the dev loss is their mean."""
        return (self.target,)

    def schedule_at(self, step: int) -> Schedule:
        """The schedule of optimizer step `step` (0-based)."""
        return self.target


@dataclass(frozen=True)
class Lower(Curriculum):
    """From full depth down to the target over `steps` steps, then the target.

    Each budget moves in a straight line from all layers to the target's; rounding keeps the budgets non-increasing
    because it is the same monotone map at every position. Prompts with a set of their own start at all layers too, and
    lose those that it leaves out from the top.
    """

    steps: int

    def schedule_at(self, step: int) -> Schedule:
        """The schedule of step `step`: full depth at step 0 (unless `steps` is 0), the target from `steps` on."""
        if step >= self.steps:
            return self.target
        layers = self.target.num_layers
        budgets = tuple(layers - (layers - b) * step // self.steps for b in self.target.budgets)
        prompt = self.target.prompt
        if not isinstance(prompt, str):
            out = sorted(set(range(layers)) - set(prompt))
            prompt = (*prompt, *out[: len(out) - len(out) * step // self.steps])
        return replace(self.target, budgets=budgets, prompt=prompt, name=f"{self.target.name}-{step}/{self.steps}")


@dataclass(frozen=True)
class Sampled(Curriculum):
    """Each step the target or one of the others, drawn from (`seed`, step); twice as often where it is there twice."""

    others: tuple[Schedule, ...]
    seed: int

    @property
    def goals(self) -> tuple[Schedule, ...]:
        """The target and the others, each once."""
        return tuple(dict.fromkeys((self.target, *self.others)))

    def schedule_at(self, step: int) -> Schedule:
        """The schedule drawn for step `step`."""
        # A generator of its own per step: no state to save, and no other draw shifts it.
        return random.Random(f"{self.seed}/{step}").choice((self.target, *self.others))


def make_curriculum(target: Schedule, config: TuneConfig) -> Curriculum:
    """The curriculum that `config` asks for."""
    if config.curriculum == "lower":
        return Lower(target, round(config.steps * config.curriculum_fraction))
    if config.curriculum == "none":
        return Curriculum(target)
    others = sampled_schedules(target, config.sampled_speedups, config.sampled_prompts)
    if set(others) <= {target}:
        raise ScheduleError("sampled budgets need a second schedule: give --sampled-speedups other than the target's")
    return Sampled(target, others, config.seed)
