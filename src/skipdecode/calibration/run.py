"""A calibration from records to a schedule: order, losses by position and budget, curve, and the check of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skipdecode.calibration.curve import LossTable, best_curve, best_flat, bucket_starts
from skipdecode.calibration.goal import Goal
from skipdecode.calibration.meter import LossMeter
from skipdecode.calibration.order import Round, greedy_order, greedy_trials
from skipdecode.calibration.settings import Settings
from skipdecode.schedule import Schedule

__all__ = ["Calibration", "Verdict", "calibrate", "trials"]


@dataclass(frozen=True)
class Verdict:
    """A schedule with the loss that was predicted for it and the losses that were measured.

    Losses are teacher-forced cross-entropy per response token. `speedup` is over full depth on texts as long as the
    records: wall-clock as the cost model has it, or in layers for a nominal target.
    """

    schedule: Schedule
    speedup: float
    mean_layers: float
    predicted: float
    measured: float
    held_out: float | None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return asdict(self) | {"schedule": self.schedule.to_dict(), "name": self.schedule.name}


@dataclass(frozen=True)
class Calibration:
    """What was learned: the drop order, losses under it, and the schedule.

    `schedule` is, of those under the calibrated order, the one that measured best within the limit. `rounds` are the
    greedy search, empty for another method; `influence` is the block influence of each layer, `starts` the first
    positions of the buckets. `verdicts` are on full depth, the paper's, evenly spaced, and those under the calibrated
    order; the calibrated one is last.
    """

    schedule: Schedule
    order: tuple[int, ...]
    rounds: tuple[Round, ...]
    influence: tuple[float, ...]
    table: LossTable
    starts: tuple[int, ...]
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every measurement."""
        return {
            "schedule": self.schedule.to_dict(),
            "order": list(self.order),
            "rounds": [r.to_dict() for r in self.rounds],
            "block_influence": list(self.influence),
            "losses_by_budget": self.table.to_dict(),
            "bucket_starts": list(self.starts),
            "verdicts": [v.to_dict() for v in self.verdicts],
        }


def calibrate(
    settings: Settings,
    goal: Goal,
    influence: Sequence[float],
    meter: LossMeter,
    held_out: LossMeter | None = None,
    *,
    name: str = "calibrated",
) -> Calibration:
    """Learn order and curve, and measure what came of them next to the baselines.

    Parameters
    ----------
    influence : sequence of float
        Block influence of each layer: the order itself, or what decides between equals.
    meter : LossMeter
        Measures the records to learn from.
    held_out : LossMeter, optional
        Measures records with other prompts, for the check.
    name : str
        Name of the calibrated schedule.
    """
    layers = goal.workload.cost.num_layers
    droppable = range(settings.warmup_layers, layers - 1)
    prior = dict(enumerate(influence))
    rounds: list[Round] = []
    if settings.method == "greedy":
        rounds = greedy_order(
            lambda sets: meter.losses([_without(layers, gone, settings) for gone in sets]),
            droppable,
            layers - goal.least,
            settings.candidates,
            prior,
        )
        order = tuple(r.dropped for r in rounds)
    else:
        order = tuple(sorted(droppable, key=lambda layer: (prior[layer], layer))[: layers - goal.least])
    table = measured_table(meter, layers, order, range(goal.least, layers + 1), settings)
    starts = bucket_starts(table.counts[1:], settings.buckets)
    tried = _curves(settings, goal, table, starts, order, name)
    chosen = min(tried, key=lambda schedule: (meter.losses([schedule])[0], goal.workload.seconds(schedule)))
    others = [schedule for schedule in tried if schedule is not chosen]
    result = replace(chosen, name=name)
    compared = [Schedule.full(layers), goal.paper, goal.even, *others, result]
    verdicts = [_verdict(s, settings, goal, meter, held_out) for s in compared]
    return Calibration(result, order, tuple(rounds), tuple(influence), table, starts, tuple(verdicts))


def trials(settings: Settings, goal: Goal) -> tuple[int, int]:
    """About how many schedules `calibrate` measures on the records, and on those held out."""
    layers = goal.workload.cost.num_layers
    drops = layers - goal.least
    searched = 0
    if settings.method == "greedy":
        searched = greedy_trials(max(0, layers - 1 - settings.warmup_layers), drops, settings.candidates)
    baselines = sum(len(set(s.budgets)) + 1 for s in (goal.paper, goal.even))
    curves = 1 if settings.use == "continuous" else 3
    return searched + drops + 1 + baselines + 3 * curves + 2, 3 + curves


def measured_table(
    meter: LossMeter, num_layers: int, order: Sequence[int], budgets: Sequence[int], settings: Settings
) -> LossTable:
    """Losses at each of the budgets under a drop order."""
    schedules = [_without(num_layers, order[: num_layers - budget], settings) for budget in budgets]
    return LossTable(meter.counts, dict(zip(budgets, meter.sums(schedules), strict=True)))


def _without(num_layers: int, gone: Sequence[int], settings: Settings) -> Schedule:
    return Schedule(num_layers, tuple(gone), (num_layers - len(gone),), settings.warmup_layers)


def _curves(
    settings: Settings, goal: Goal, table: LossTable, starts: Sequence[int], order: tuple[int, ...], name: str
) -> list[Schedule]:
    """Curves under the calibrated order within the limit: solved, flat, and the paper's."""
    workload = goal.workload
    ends = [*starts[1:], len(workload.steps)]
    losses = table.by_bucket(starts)
    costs = [
        {budget: sum(workload.seconds_at(p, budget) for p in range(first, end)) for budget in table.sums}
        for first, end in zip(starts, ends, strict=True)
    ]

    def schedule(budgets: tuple[int, ...], label: str) -> Schedule:
        return Schedule(workload.cost.num_layers, order, budgets, settings.warmup_layers, name=label)

    found: list[Schedule] = []
    if (flat := best_flat(losses, costs, goal.limit)) is not None:
        found.append(schedule((flat,), f"{name}-flat"))
    if settings.use == "lockstep":
        if (curve := best_curve(losses, costs, goal.limit)) is not None:
            lengths = [end - first for first, end in zip(starts, ends, strict=True)]
            budgets = [b for b, length in zip(curve, lengths, strict=True) for _ in range(length)]
            found.append(schedule(_cut(budgets, goal.seq_len), f"{name}-solved"))
        if min(goal.paper.budgets) >= goal.least:
            found.append(schedule(goal.paper.budgets, f"{name}-linear"))
    return found


def _cut(budgets: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """The list without what the last budget says anyway, but not shorter than `seq_len`."""
    end = len(budgets)
    while end > seq_len and budgets[end - 1] == budgets[end - 2]:
        end -= 1
    return tuple(budgets[:end])


def _verdict(
    schedule: Schedule, settings: Settings, goal: Goal, meter: LossMeter, held_out: LossMeter | None
) -> Verdict:
    table = measured_table(meter, schedule.num_layers, schedule.drop_order, sorted(set(schedule.budgets)), settings)
    return Verdict(
        schedule,
        goal.workload.speedup(schedule),
        goal.workload.mean_layers(schedule),
        table.predict(schedule.budgets),
        meter.losses([schedule])[0],
        None if held_out is None else held_out.losses([schedule])[0],
    )
