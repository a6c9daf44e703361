"""The schedules that a calibrated one has to beat, at the same cost: the paper's and evenly spaced. Pure Python."""

from __future__ import annotations

from skipdecode.calibration.workload import Workload
from skipdecode.schedule import Schedule
from skipdecode.schedule.budgets import least_budget

__all__ = ["deepest_flat", "evenly_spaced", "paper_within"]

_MEANS = 2000
_SLACK = 1 + 1e-12


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


def evenly_spaced(schedule: Schedule) -> Schedule:
    """Evenly spaced layers with the same budgets, and so at the same cost."""
    return Schedule.even(schedule.num_layers, schedule.budgets, warmup_layers=schedule.warmup_layers)


def deepest_flat(workload: Workload, limit: float, warmup_layers: int) -> int | None:
    """The most layers that all steps may run within the limit; None if even the fewest take longer."""
    layers = workload.cost.num_layers
    for budget in range(layers, least_budget(layers, warmup_layers) - 1, -1):
        schedule = Schedule.constant(layers, budget, warmup_layers=warmup_layers)
        if workload.seconds(schedule) <= limit * _SLACK:
            return budget
    return None
