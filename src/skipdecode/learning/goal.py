"""From a target to a limit in seconds, the prompt sets with which it is in reach, and the paper's schedule for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, TypeVar

from skipdecode.cost.model import CostModel, TextCost
from skipdecode.cost.solve import Depths, out_of_reach
from skipdecode.data.examples import Example
from skipdecode.errors import TargetError, UsageError
from skipdecode.learning.settings import CalibrationSettings
from skipdecode.models.families import check_schedule, layers_in, lenders, projects
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule.order import bottom_up, lent_order, prompt_set

_Settings = TypeVar("_Settings", bound=CalibrationSettings)
_PROMPT_WEIGHT = 0.4
"""A layer that prompts skip loses less than one that new tokens skip: with this, squares of the shares that are skipped
order the losses before tuning of all stored searches (docs/LOG.md)."""
_APART = 12  # the sets that are tried differ by this part of the layers


@dataclass(frozen=True)
class _InReach:
    """A prompt set with which the target is in reach: the layers that prompts run, and those that new tokens may run.

    The latter are for a schedule of one depth.
    """

    prompt: PromptDepth
    prompt_layers: int
    token_layers: int

    def expected_loss(self, layers: int) -> float:
        """Return a number that orders prompt sets of a model with so many layers as their losses would."""
        prompts, tokens = 1 - self.prompt_layers / layers, 1 - self.token_layers / layers
        return _PROMPT_WEIGHT * prompts**2 + tokens**2


@dataclass(frozen=True)
class Goal:
    """The search target: a time limit, the workload that it is for, the prompt sets to try.

    `limit` is the most seconds (layers, for a nominal target), `least` the fewest layers of the drop order. `depths`
    are the schedules in the paper's order, linear decays or flat, and `paper` the one for the target. `prompts` are the
    prompt sets with which the target is in reach, those first that promise least loss; of the default sets the first,
    another one, and "max_exit". `shared`: the layers that read another's keys and values, each with that layer.
    """

    workload: TextCost
    limit: float
    least: int
    depths: Depths
    paper: Schedule
    prompts: tuple[PromptDepth, ...]
    shared: Mapping[int, int]

    def schedule(self, order: Sequence[int], prompt: PromptDepth) -> Schedule:
        """The deepest schedule in a drop order, for a prompt set of `prompts`; the fewest layers if none fits."""
        depths = replace(self.depths, order=tuple(order))
        return depths.within(self.workload, self.limit, prompt) or depths.schedule(0.0, prompt)


def prompt_sets(settings: CalibrationSettings, layers: int) -> list[PromptDepth]:
    """The prompt sets to try; raises a SkipDecodeError for one that cannot be."""
    if not settings.whole:
        return ["full"]
    lowest = range(5 * layers // 6, max(1, settings.warmup_layers, layers // 6) - 1, -1)
    words = settings.prompt_depths or ("full", *map(str, lowest), "max_exit")
    return list(dict.fromkeys(prompt_set(word, layers) for word in words))


def suited(settings: _Settings, config: Any) -> _Settings:
    """The settings for a model with this transformers config, in which prompts may have no sets of layers.

    Raises an error if the settings do not fit the model, before any work.
    """
    layers, warmup = layers_in(config), settings.warmup_layers
    if settings.whole and not settings.prompt_depths and not projects(config):
        settings = replace(settings, prompt_depths=("full", "max_exit"))
    _lowest_order(settings, layers, lenders(config))
    for prompt in prompt_sets(settings, layers):
        check_schedule(config, Schedule.constant(layers, layers, warmup_layers=warmup, prompt=prompt))
    if settings.nominal_speedup is not None:
        Schedule.from_speedup(layers, settings.nominal_speedup, 64, warmup_layers=warmup)
    return settings


def _lowest_order(settings: CalibrationSettings, layers: int, shared: Mapping[int, int]) -> tuple[int, ...]:
    """The paper's order, with all layers that may go; UsageError if the settings keep more layers than there are."""
    if not 0 <= settings.warmup_layers < layers:
        raise UsageError(
            f"`warmup_layers` {settings.warmup_layers} is not accepted for {layers} layers: give 0 to {layers - 1}"
        )
    return lent_order(bottom_up(layers, settings.warmup_layers), shared)


def seq_len_of(lengths: Sequence[int]) -> int:
    """Return the 95th percentile of the lengths of texts: the positions of a schedule for them."""
    return sorted(lengths)[round(0.95 * (len(lengths) - 1))]


def goal_of_records(
    settings: CalibrationSettings, cost: CostModel | None, examples: Sequence[Example], config: Any
) -> Goal:
    """Return the goal for texts like these records, of a model with this transformers config; raises as `set_goal`."""
    prompt_len, lengths = mean_prompt(examples), [len(example.response) for example in examples]
    return set_goal(settings, cost, prompt_len, lengths, layers_in(config), lenders(config))


def mean_prompt(examples: Sequence[Example]) -> int:
    """Return the mean number of tokens of the prompts."""
    return round(fmean(len(example.prompt) for example in examples))


def set_goal(
    settings: CalibrationSettings,
    cost: CostModel | None,
    prompt_len: int,
    lengths: Sequence[int],
    layers: int,
    shared: Mapping[int, int] | None = None,
) -> Goal:
    """The goal for texts of these lengths (generated tokens, end token included).

    `cost`: needed for a wall-clock target, with the maps of a fit if there is to be one. `shared`: of `Goal`.

    Raises TargetError: no schedule that keeps warm-up layers and last layer reaches the target; UsageError:
    `warmup_layers` does not fit the model.
    """
    warmup, flat, shared = settings.warmup_layers, settings.flat, shared or {}
    lowest = _lowest_order(settings, layers, shared)
    floor = layers - len(lowest)
    layers_alone = CostModel.of_step(layers, 1, 0.0, 1.0)  # under which a speed-up is the nominal one
    workload = TextCost.of_lengths(cost or layers_alone, prompt_len, lengths, whole=settings.whole)
    seq_len = seq_len_of(lengths)
    limit = _limit(settings, workload, seq_len)
    depths = Depths(layers, lowest, warmup, seq_len, flat)
    wanted, in_reach = prompt_sets(settings, layers), list[_InReach]()
    for prompt in wanted:
        # What prompts run goes first: then they project the most layers, the order that costs most.
        order = sorted(lowest, key=lambda layer: isinstance(prompt, tuple) and layer not in prompt)
        level = replace(depths, flat=True, order=tuple(order)).within(workload, limit, prompt)
        if level is not None:
            in_reach.append(_InReach(prompt, len(level.prompt_layers()), level.budgets[0]))
    if not in_reach:
        fewest = Schedule.constant(layers, floor, warmup_layers=0, drop_order=range(layers - 1))
        best = max((replace(fewest, prompt=prompt) for prompt in wanted), key=workload.speedup)
        target = settings.target_speedup or settings.nominal_speedup or 1
        raise TargetError(out_of_reach(workload, target, best, " that warm-up layers and last layer allow"))

    if not settings.prompt_depths:
        in_reach = _worth_trying(in_reach, layers)
    prompts = tuple(each.prompt for each in sorted(in_reach, key=lambda each: each.expected_loss(layers)))
    paper = depths.within(workload, limit, prompts[0]) or depths.schedule(0.0, prompts[0])
    least = min(each.token_layers for each in in_reach)
    if not flat:  # or half of it, and no more than the least of the paper's
        least = max(floor, min(paper.budgets[-1], math.ceil(least / 2)))
    return Goal(workload, limit, least, depths, paper, prompts, shared)


def _worth_trying(in_reach: Sequence[_InReach], layers: int) -> list[_InReach]:
    """The set that is expected to lose least, the next one that clearly differs from it, and "max_exit".

    A set of fewer layers that leaves new tokens no more than another is none of them.
    """
    at_exit = [each for each in in_reach if each.prompt == "max_exit"]
    own = [each for each in in_reach if each.prompt != "max_exit"]
    useful = [
        each
        for each in own
        if all(each.token_layers > other.token_layers for other in own if other.prompt_layers > each.prompt_layers)
    ]
    useful.sort(key=lambda each: each.expected_loss(layers))
    differing = [each for each in useful if _APART * abs(each.prompt_layers - useful[0].prompt_layers) >= layers]
    return [*useful[:1], *differing[:1], *at_exit]


def _limit(settings: CalibrationSettings, workload: TextCost, seq_len: int) -> float:
    if settings.target_speedup is not None:
        return workload.full_seconds / settings.target_speedup
    layers = workload.cost.num_layers
    named = Schedule.from_speedup(layers, settings.nominal_speedup or 1, seq_len, warmup_layers=settings.warmup_layers)
    return workload.seconds(named.flattened() if settings.flat else named)
