"""The speed-up by the cost model that is needed for a speed-up of whole requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from skipdecode.common.progress import note
from skipdecode.common.spread import spread_over
from skipdecode.cost.model import CostModel
from skipdecode.data.examples import Example
from skipdecode.errors import TargetError
from skipdecode.evaluation.method_runs import in_w8a8
from skipdecode.generation.llm import LLM
from skipdecode.generation.speed import Method, fitting_share, request_seconds, time_equal_lengths
from skipdecode.learning.goal import Goal, goal_of_records
from skipdecode.learning.settings import CalibrationSettings
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.schedule import Schedule

_ROUNDS, _BATCHES = 2, 2
_WITHIN, _MOST = 1.01, 1.5  # closer than this is no difference; the most, times the target, that is planned
_MILD = 1.05  # planned where the weights alone reach the target


def target_of_steps(
    settings: CalibrationSettings,
    cost: CostModel,
    loaded: LoadedModel,
    examples: Sequence[Example],
    batch: int,
    until: float,
    quantization: str = "none",
) -> float:
    """Return the speed-up to plan with a cost model, so that requests decoded as by default reach the target.

    Requests are measured at full depth and under a schedule of this target, with the weights of `quantization`. Between
    these two, the time of a request is taken as linear in the time of the model's steps, which a cost model knows.

    `until`: reading of `time.perf_counter()` at which the measurement ends. Raises TargetError: see `goal_of_records`.
    """

    def goal_of(target: float) -> Goal:
        return goal_of_records(replace(settings, target_speedup=target), cost, examples, loaded.checkpoint.config)

    wanted = settings.target_speedup or 1.0
    goal = goal_of(wanted)
    planned = goal.workload.seconds(goal.paper) / goal.workload.full_seconds
    full, skipping = _request_times(goal.paper, loaded, quantization, examples, batch, until)
    if full <= 1 / wanted:
        note(f"{quantization} weights alone make requests {1 / full:.2f} times as fast: very few layers are skipped")
        return _MILD
    if skipping >= full:
        return wanted
    steps = 1 - (1 - planned) * (full - 1 / wanted) / (full - skipping)
    target = 1 / max(steps, 1 / (_MOST * wanted))
    if 1 / _WITHIN < target / wanted < _WITHIN:
        return wanted
    try:
        goal_of(target)
    except TargetError:  # no schedule makes up for the difference
        target = wanted
    note(f"requests gain {1 / skipping:.2f}x where steps gain {1 / planned:.2f}x: planned for {target:.2f}x of steps")
    return target


def _request_times(
    schedule: Schedule,
    loaded: LoadedModel,
    quantization: str,
    examples: Sequence[Example],
    batch: int,
    until: float,
) -> tuple[float, float]:
    """Measure requests of these lengths at full depth and under a schedule, with the weights of `quantization`.

    Times are shares of the time that the model's own weights take at full depth.
    """
    backend = LLM(loaded).backend
    weights = backend if quantization == "none" else in_w8a8(backend) or backend
    # Drafts follow texts, which a schedule that is not tuned yet writes badly: with them it gains a sixth less.
    plain = full = Method(backend, exact=False)
    if weights is not backend:
        full = Method(weights, exact=False)
    skipping = Method(weights, schedule, exact=False)
    methods = list(dict.fromkeys([plain, full, skipping]))
    chosen = [examples[i] for i in spread_over(len(examples), min(len(examples), _BATCHES * batch))]
    prompts, lengths = [example.prompt for example in chosen], [max(2, len(example.response)) for example in chosen]
    share = fitting_share(methods, prompts[:batch], max(lengths), (until - time.perf_counter()) / len(methods))
    turns = time_equal_lengths(methods, prompts, lengths, batch_size=batch, rounds=_ROUNDS, share=share, until=until)
    clock = request_seconds(1 / share)
    return 1 / (turns.ratio(plain, full, clock) or 1.0), 1 / (turns.ratio(plain, skipping, clock) or 1.0)
