"""From a target to a limit in seconds, and the baselines to beat there: the paper's schedule, evenly spaced layers.

Texts differ in length, so late positions are decoded less often than early ones, and a layer left out there saves less.
The share of texts that are still being generated is taken from the data: in lockstep a step is made while any of the
batch's rows goes on, in continuous use every row counts for itself. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Self

from skipdecode.calibration.settings import CalibrationSettings
from skipdecode.errors import DataError, TargetError, UsageError
from skipdecode.performance.cost import CostModel, Use
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule.order import Order, bottom_up, least_budget, prompt_set

SLACK = 1 + 1e-12
_MEANS = 2000
_PROMPT_SHARES = (2 / 3, 1 / 2, 1 / 3)


def layers_only(num_layers: int) -> CostModel:
    """A cost model that counts layers and nothing else: speed-up under it is the paper's nominal one."""
    return CostModel.of_step(num_layers, 1, 0.0, 1.0)


@dataclass(frozen=True)
class TextCost:
    """A cost model with the texts that are decoded.

    Rows have `prompt_len` prompt tokens; `steps` are a batch's expected decode steps at generation position 0, 1, ….
    Where it is the `whole` request that counts, so do the batch's prompts.
    """

    cost: CostModel
    prompt_len: int
    steps: tuple[float, ...]
    whole: bool = False

    @classmethod
    def of_lengths(
        cls, cost: CostModel, prompt_len: int, lengths: Sequence[int], use: Use = "lockstep", *, whole: bool = False
    ) -> Self:
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
        return cls(cost, prompt_len, tuple(1 - (1 - share) ** rows for share in going_on), whole)

    def seconds_at(self, position: int, budget: int) -> float:
        """Expected seconds of the steps at one position if they run `budget` layers."""
        return self.steps[position] * self.cost.step_seconds(budget, self.prompt_len + position + 1)

    def prompts_seconds(self, schedule: Schedule) -> float:
        """Seconds of a batch's prompts, where they count."""
        return self.cost.prompts_seconds(schedule, self.prompt_len) if self.whole else 0.0

    def seconds(self, schedule: Schedule) -> float:
        """Expected seconds of what counts: the decode phase, or the whole request."""
        schedule.check_fits(self.cost.num_layers)
        steps = sum(self.seconds_at(position, schedule.budget(position)) for position in range(len(self.steps)))
        return self.prompts_seconds(schedule) + steps

    def speedup(self, schedule: Schedule) -> float:
        """Speed-up of what counts over full depth."""
        return self.full_seconds / self.seconds(schedule)

    def mean_layers(self, schedule: Schedule) -> float:
        """Layers that a step runs, on average."""
        listed = (count * schedule.budget(position) for position, count in enumerate(self.steps))
        return sum(listed) / sum(self.steps)

    @cached_property
    def full_seconds(self) -> float:
        """Expected seconds of what counts at full depth."""
        return self.seconds(Schedule.full(self.cost.num_layers))


@dataclass(frozen=True)
class Goal:
    """What the schedule has to fit in, with texts and cost.

    `workload` has the cost of a fit, if there is to be one; `unfitted` has not, and the baselines are solved under it.
    `limit` is the most seconds (layers, for a nominal target) of what counts, `least` the fewest layers of the drop
    order, `seq_len` the positions of the linear decay; with `flat` (continuous use) all schedules are flat. `paper` and
    `even` are baselines of this cost. `prompts` are the prompt sets with which the target is in reach, those of one
    depth together.
    """

    workload: TextCost
    unfitted: TextCost
    limit: float
    least: int
    seq_len: int
    flat: bool
    paper: Schedule
    even: Schedule
    prompts: tuple[tuple[PromptDepth, ...], ...]

    def schedule(self, order: Sequence[int], prompt: PromptDepth) -> Schedule:
        """The deepest schedule in a drop order, for a prompt set of `prompts`: linear or flat."""
        fixed, warmup = (self.workload, self.limit), self.paper.warmup_layers
        flat = flat_within(*fixed, warmup, prompt, order) if self.flat else None
        return flat or linear_within(*fixed, self.seq_len, warmup, prompt, order)


def prompt_sets(settings: CalibrationSettings, layers: int) -> list[tuple[PromptDepth, ...]]:
    """The prompt sets to try, those of one depth together; raises a SkipDecodeError for one that cannot be."""
    if not settings.whole:
        return [("full",)]
    warmup = settings.warmup_layers
    found: list[tuple[PromptDepth, ...]] = []
    for word in settings.prompt_depths or ("full", *(str(max(1, warmup, round(layers * s))) for s in _PROMPT_SHARES)):
        prompt = prompt_set(word, layers)
        if prompt == "max_exit":
            raise UsageError("--prompt-depths max_exit hangs on the curve that is looked for: list its layers instead")
        Schedule.constant(layers, layers, warmup_layers=warmup, prompt=prompt)
        spread = word.isdecimal() and warmup < int(word) < layers
        even = (Schedule.even(layers, int(word), warmup_layers=warmup).layers(0),) if spread else ()
        found.append((prompt, *even))
    return list(dict.fromkeys(found))


def check_layers(settings: CalibrationSettings, layers: int) -> None:
    """Raise UsageError where `least` or `warmup_layers` does not fit a model of so many layers."""
    warmup = settings.warmup_layers
    floor = least_budget(layers, warmup)
    for name, value, most in (("--warmup-layers", warmup, layers - 1), ("--least", settings.least or floor, layers)):
        low = 0 if name == "--warmup-layers" else floor
        if not low <= value <= most:
            raise UsageError(f"{name} {value} is not accepted for {layers} layers: give {low} to {most}")


def set_goal(
    settings: CalibrationSettings,
    cost: CostModel | None,
    prompt_len: int,
    lengths: Sequence[int],
    layers: int,
    fitted: CostModel | None = None,
) -> Goal:
    """The goal for texts of these lengths (generated tokens, end token included).

    Parameters
    ----------
    cost : CostModel or None
        Needed for a wall-clock target.
    fitted : CostModel, optional
        The cost with the fit that the schedule gets.

    Raises
    ------
    TargetError
        No schedule that keeps warm-up layers, last layer and `least` reaches the target.
    UsageError
        `least` or `warmup_layers` does not fit the model.
    """
    check_layers(settings, layers)
    warmup = settings.warmup_layers
    floor = least_budget(layers, warmup)
    unfitted = TextCost.of_lengths(cost or layers_only(layers), prompt_len, lengths, settings.use, whole=settings.whole)
    workload = replace(unfitted, cost=fitted or unfitted.cost)
    ordered = sorted(lengths)
    seq_len = settings.seq_len or ordered[round(0.95 * (len(ordered) - 1))]
    limit = _limit(settings, workload, seq_len)
    wanted = prompt_sets(settings, layers)
    flats = {prompt: flat_within(workload, limit, warmup, prompt) for prompt in chain(*wanted)}
    deepest = {prompt: flat.budgets[0] for prompt, flat in flats.items() if flat is not None}
    within = {prompt: most for prompt, most in deepest.items() if most >= (settings.least or floor)}
    if not within:
        raise TargetError(_out_of_reach(settings, workload, floor, list(flats)))
    prompts = tuple(filter(None, (tuple(prompt for prompt in sets if prompt in within) for sets in wanted)))
    # Of baselines one prompt set is enough: the one that leaves both phases most.
    prompt, most = max(within.items(), key=lambda each: min(layers if each[0] == "full" else len(each[0]), each[1]))
    if settings.use == "continuous":
        least = min(within.values())
        paper = Schedule.constant(layers, most, warmup_layers=warmup, prompt=prompt)
        even = paper.reordered("even")
    else:
        paper = linear_within(unfitted, limit, seq_len, warmup, prompt)
        even = linear_within(unfitted, limit, seq_len, warmup, prompt, "even")
        least = max(floor, min(paper.budgets[-1], math.ceil(min(within.values()) / 2)))
    baselines = replace(paper, name="paper"), replace(even, name="even")
    return Goal(
        workload, unfitted, limit, settings.least or least, seq_len, settings.use == "continuous", *baselines, prompts
    )


def _limit(settings: CalibrationSettings, workload: TextCost, seq_len: int) -> float:
    if settings.target_speedup is not None:
        return workload.full_seconds / settings.target_speedup
    layers = workload.cost.num_layers
    named = Schedule.from_speedup(layers, settings.nominal_speedup or 1, seq_len, warmup_layers=settings.warmup_layers)
    return workload.seconds(named.flattened() if settings.use == "continuous" else named)


def _out_of_reach(settings: CalibrationSettings, workload: TextCost, floor: int, prompts: Sequence[PromptDepth]) -> str:
    layers = workload.cost.num_layers
    asked = settings.least or floor
    fewest = Schedule.constant(layers, asked, warmup_layers=0, drop_order=range(layers - 1))
    best = max((replace(fewest, prompt=prompt) for prompt in prompts), key=workload.speedup)
    bound = math.floor(workload.speedup(best) * 100) / 100
    what = "--least" if settings.least is not None else "warm-up layers and last layer"
    target = settings.target_speedup or settings.nominal_speedup
    depth = f"and {len(best.prompt_layers())} for prompts, of the whole request " if settings.whole else ""
    return (
        f"a speed-up of {target:g} is out of reach on these records: with {asked} of {layers} layers, the fewest that "
        f"{what} allow, {depth}the bound is {bound:.2f}x at batch {workload.cost.batch}"
    )


def linear_within(
    workload: TextCost,
    limit: float,
    seq_len: int,
    warmup_layers: int,
    prompt: PromptDepth = "full",
    order: Order | Sequence[int] = "bottom-up",
) -> Schedule:
    """The linear decay of the largest mean depth that takes `limit` at most; else the fewest layers everywhere.

    `order` is one by its name, or a list of layers; layers that it does not name always run.
    """
    layers = workload.cost.num_layers
    floor = least_budget(layers, warmup_layers) if isinstance(order, str) else layers - len(order)

    def ordered(schedule: Schedule) -> Schedule:
        if isinstance(order, str):
            return schedule.reordered(order)
        budgets = tuple(max(budget, floor) for budget in schedule.budgets)
        return replace(schedule, drop_order=tuple(order), budgets=budgets)

    for step in range(_MEANS + 1):
        mean = layers - (layers - floor) * step / _MEANS
        linear = Schedule.from_speedup(layers, layers / mean, seq_len, warmup_layers=warmup_layers, prompt=prompt)
        if workload.seconds(schedule := ordered(linear)) <= limit * SLACK:
            return schedule
    return ordered(Schedule.constant(layers, floor, warmup_layers=warmup_layers, prompt=prompt))


def flat_within(
    workload: TextCost,
    limit: float,
    warmup_layers: int,
    prompt: PromptDepth = "full",
    order: Sequence[int] | None = None,
) -> Schedule | None:
    """The deepest flat schedule that takes `limit` at most, by default in the order that costs most; None if none."""
    layers = workload.cost.num_layers
    if order is None:
        # What prompts run goes first: then they project the most layers.
        order = sorted(bottom_up(layers, warmup_layers), key=lambda layer: prompt != "full" and layer not in prompt)
    for budget in range(layers, layers - len(order) - 1, -1):
        schedule = Schedule.constant(layers, budget, drop_order=order, warmup_layers=warmup_layers, prompt=prompt)
        if workload.seconds(schedule) <= limit * SLACK:
            return schedule
    return None
