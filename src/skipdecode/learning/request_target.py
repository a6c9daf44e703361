"""The speed-up by the cost model that is needed for a speed-up of whole requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from skipdecode.common.progress import note
from skipdecode.cost.model import CostModel
from skipdecode.data.examples import Example
from skipdecode.common.spread import spread_over
from skipdecode.errors import TargetError
from skipdecode.generation.llm import LLM
from skipdecode.generation.speed import Method, fitting_share, request_seconds, time_equal_lengths
from skipdecode.learning.goal import Goal, goal_of_records
from skipdecode.learning.settings import CalibrationSettings
from skipdecode.models.loading.checkpoint import LoadedModel

_ROUNDS, _BATCHES = 2, 2
_WITHIN, _MOST = 1.02, 1.5  # closer than this is no difference; the most, times the target, that is planned


def target_of_steps(
    settings: CalibrationSettings,
    cost: CostModel,
    loaded: LoadedModel,
    examples: Sequence[Example],
    batch: int,
    until: float,
) -> float:
    """Return the speed-up to plan with a cost model, so that requests decoded as by default reach the target.

    Requests of a schedule of this target are measured, and the time that both sides have beside the model's, which a
    cost model does not know, is taken as equal.

    `until`: reading of `time.perf_counter()` at which the measurement ends. Raises TargetError: see `goal_of_records`.
    """

    def goal_of(target: float) -> Goal:
        return goal_of_records(replace(settings, target_speedup=target), cost, examples, loaded.checkpoint.config)

    wanted = settings.target_speedup or 1.0
    goal = goal_of(wanted)
    full, planned = goal.workload.full_seconds, goal.workload.seconds(goal.paper)
    predicted, measured = full / planned, _request_speedup(goal, loaded, examples, batch, until)
    if measured <= 1 or 1 / _WITHIN < predicted / measured < _WITHIN:
        return wanted
    outside = (full - measured * planned) / (measured - 1)
    target = full / max(full / (_MOST * wanted), (full + outside) / wanted - outside)
    try:
        goal_of(target)
    except TargetError:  # no schedule makes up for the difference
        target = wanted
    note(f"requests gain {measured:.2f}x where steps gain {predicted:.2f}x: planned for {target:.2f}x of steps")
    return target


def _request_speedup(goal: Goal, loaded: LoadedModel, examples: Sequence[Example], batch: int, until: float) -> float:
    """Measure the speed-up of the paper's schedule for requests of these lengths, in the time there is."""
    backend = LLM(loaded).backend
    # Drafts follow texts, which a schedule that is not tuned yet writes badly: with them it gains a sixth less.
    methods = full, method = Method(backend, exact=False), Method(backend, goal.paper, exact=False)
    chosen = [examples[i] for i in spread_over(len(examples), min(len(examples), _BATCHES * batch))]
    prompts, lengths = [example.prompt for example in chosen], [max(2, len(example.response)) for example in chosen]
    share = fitting_share(methods, prompts[:batch], max(lengths), (until - time.perf_counter()) / 2)
    turns = time_equal_lengths(methods, prompts, lengths, batch_size=batch, rounds=_ROUNDS, share=share, until=until)
    return turns.ratio(full, method, request_seconds(1 / share)) or 1.0
