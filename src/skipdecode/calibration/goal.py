"""From a target to a limit in seconds, and the baselines to beat there: the paper's schedule, evenly spaced layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skipdecode.calibration.settings import CalibrationSettings
from skipdecode.calibration.workload import Workload, layers_only
from skipdecode.errors import TargetError, UsageError
from skipdecode.performance.cost import CostModel
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import least_budget

__all__ = ["Goal", "deepest_flat", "paper_within", "set_goal"]

_MEANS = 2000
_SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Goal:
    """What the curve has to fit in.

    Parameters
    ----------
    limit : float
        Most seconds (layers, for a nominal target) of the decode phase.
    least : int
        Fewest layers of the drop order.
    seq_len : int
        Positions of the paper's curve.
    paper, even : Schedule
        Baselines of this cost; flat in continuous use.
    """

    workload: Workload
    limit: float
    least: int
    seq_len: int
    paper: Schedule
    even: Schedule


def set_goal(
    settings: CalibrationSettings, cost: CostModel | None, prompt_len: int, lengths: Sequence[int], layers: int
) -> Goal:
    """The goal for texts of these lengths (generated tokens, end token included).

    Parameters
    ----------
    cost : CostModel or None
        Needed for a wall-clock target.

    Raises
    ------
    TargetError
        No schedule that keeps warm-up layers, last layer and `least` reaches the target.
    UsageError
        `least` or `warmup_layers` does not fit the model.
    """
    warmup = settings.warmup_layers
    floor = least_budget(layers, warmup)
    for name, value, most in (("--warmup-layers", warmup, layers - 1), ("--least", settings.least or floor, layers)):
        low = 0 if name == "--warmup-layers" else floor
        if not low <= value <= most:
            raise UsageError(f"{name} {value} is not accepted for {layers} layers: give {low} to {most}")
    workload = Workload.of_lengths(cost or layers_only(layers), prompt_len, lengths, settings.use)
    ordered = sorted(lengths)
    seq_len = settings.seq_len or ordered[round(0.95 * (len(ordered) - 1))]
    limit = _limit(settings, workload, seq_len)
    flat = deepest_flat(workload, limit, warmup)
    if flat is None or (settings.least is not None and settings.least > flat):
        raise TargetError(_out_of_reach(settings, workload, floor))
    if settings.use == "continuous":
        paper = Schedule.constant(layers, flat, warmup_layers=warmup, name="paper")
        least = settings.least or flat
    else:
        paper = paper_within(workload, limit, seq_len, warmup)
        least = settings.least or max(floor, min(paper.budgets[-1], math.ceil(flat / 2)))
    return Goal(workload, limit, least, seq_len, paper, paper.reordered("even", name="even"))


def _limit(settings: CalibrationSettings, workload: Workload, seq_len: int) -> float:
    if settings.target_speedup is not None:
        return workload.full_seconds / settings.target_speedup
    layers = workload.cost.num_layers
    named = Schedule.from_speedup(layers, settings.nominal_speedup or 1, seq_len, warmup_layers=settings.warmup_layers)
    return workload.seconds(named.flattened() if settings.use == "continuous" else named)


def _out_of_reach(settings: CalibrationSettings, workload: Workload, floor: int) -> str:
    layers = workload.cost.num_layers
    asked = settings.least or floor
    fewest = Schedule.constant(layers, asked, warmup_layers=0, drop_order=range(layers - 1))
    bound = math.floor(workload.speedup(fewest) * 100) / 100
    what = "--least" if settings.least is not None else "warm-up layers and last layer"
    target = settings.target_speedup or settings.nominal_speedup
    return (
        f"a speed-up of {target:g} is out of reach on these records: with {asked} of {layers} layers, the fewest that "
        f"{what} allow, the bound is {bound:.2f}x at batch {workload.cost.batch}"
    )


def paper_within(workload: Workload, limit: float, seq_len: int, warmup_layers: int) -> Schedule:
    """The paper's schedule (bottom up, linear) of the largest mean depth whose decode phase takes `limit` at most.

    The least flat schedule where none of them is that short.
    """
    layers = workload.cost.num_layers
    floor = least_budget(layers, warmup_layers)
    for step in range(_MEANS + 1):
        mean = layers - (layers - floor) * step / _MEANS
        schedule = Schedule.from_speedup(layers, layers / mean, seq_len, warmup_layers=warmup_layers, name="paper")
        if workload.seconds(schedule) <= limit * _SLACK:
            return schedule
    return Schedule.constant(layers, floor, warmup_layers=warmup_layers, name="paper")


def deepest_flat(workload: Workload, limit: float, warmup_layers: int) -> int | None:
    """The most layers that all steps may run within the limit; None if even the fewest take longer."""
    layers = workload.cost.num_layers
    for budget in range(layers, least_budget(layers, warmup_layers) - 1, -1):
        schedule = Schedule.constant(layers, budget, warmup_layers=warmup_layers)
        if workload.seconds(schedule) <= limit * _SLACK:
            return budget
    return None
