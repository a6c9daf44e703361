"""A calibration from records to a schedule: order, losses by position, budget and prompt set, curve, and the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skipdecode.calibration.curve import SLACK, LossTable, best_curve, best_flat, bucket_starts
from skipdecode.calibration.goal import Goal
from skipdecode.calibration.meter import LossMeter
from skipdecode.calibration.order import Round, greedy_order, greedy_trials
from skipdecode.calibration.settings import CalibrationSettings
from skipdecode.schedule import PromptDepth, Schedule

__all__ = ["Calibration", "Verdict", "calibrate", "trials"]


@dataclass(frozen=True)
class Verdict:
    """A schedule with the loss that was predicted for it and the losses that were measured.

    Losses are teacher-forced cross-entropy per response token. `speedup` is over full depth on texts as long as the
    records: of what the target counts, wall-clock as the cost model has it, or in layers for a nominal target, which
    has no other two.
    """

    schedule: Schedule
    speedup: float
    mean_layers: float
    predicted: float
    measured: float
    held_out: float | None
    request_speedup: float | None
    decode_speedup: float | None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        schedule = self.schedule
        named = {"schedule": schedule.to_dict(), "name": schedule.name, "prompt_layers": len(schedule.prompt_layers())}
        return asdict(self) | named


@dataclass(frozen=True)
class Calibration:
    """What was learned: the drop order, losses under it, and the schedule.

    `schedule` is, of those under the calibrated order, the one that measured best within the limit. `rounds` are the
    greedy search, empty for another method; `influence` is the block influence of each layer, `tables` the losses by
    prompt set, `starts` the first positions of the buckets. `verdicts` are on full depth, the paper's, evenly spaced,
    the best of every other prompt set, and those with the calibrated one's; the calibrated one is last.
    """

    schedule: Schedule
    order: tuple[int, ...]
    rounds: tuple[Round, ...]
    influence: tuple[float, ...]
    tables: Mapping[PromptDepth, LossTable]
    starts: tuple[int, ...]
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every measurement."""
        return {
            "schedule": self.schedule.to_dict(),
            "order": list(self.order),
            "rounds": [r.to_dict() for r in self.rounds],
            "block_influence": list(self.influence),
            "losses_by_budget": self.tables[self.schedule.prompt].to_dict(),
            "losses_by_prompt": [{"prompt": prompt, **table.to_dict()} for prompt, table in self.tables.items()],
            "bucket_starts": list(self.starts),
            "verdicts": [v.to_dict() for v in self.verdicts],
        }


def calibrate(
    settings: CalibrationSettings,
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
    starts = bucket_starts(meter.counts[1:], settings.buckets)
    tables: dict[PromptDepth, LossTable] = {}
    tried: dict[Schedule, float] = {}
    for sets in goal.prompts:
        prompt = _best_set(sets, meter, layers, order, settings)
        tables[prompt] = measured_table(meter, layers, order, range(goal.least, layers + 1), settings, prompt)
        curves = _curves(settings, goal, tables[prompt], starts, order, name, prompt)
        tried |= {schedule: meter.losses([schedule])[0] for schedule in curves}
    ranked = sorted(tried, key=lambda schedule: (tried[schedule], goal.workload.seconds(schedule)))
    chosen, best = ranked[0], {schedule.prompt: schedule for schedule in reversed(ranked)}
    others = [s for s in tried if s is not chosen and (s.prompt == chosen.prompt or s is best[s.prompt])]
    result = replace(chosen, name=name)
    compared = [Schedule.full(layers), goal.paper, goal.even, *others, result]
    verdicts = [_verdict(s, settings, goal, meter, held_out) for s in compared]
    return Calibration(result, order, tuple(rounds), tuple(influence), tables, starts, tuple(verdicts))


def trials(settings: CalibrationSettings, goal: Goal) -> tuple[int, int]:
    """About how many schedules `calibrate` measures on the records, and on those held out."""
    layers = goal.workload.cost.num_layers
    drops = layers - goal.least
    searched = 0
    if settings.method == "greedy":
        searched = greedy_trials(max(0, layers - 1 - settings.warmup_layers), drops, settings.candidates)
    baselines = sum(len(set(s.budgets)) + 1 for s in (goal.paper, goal.even))
    curves, sets = 1 if settings.use == "continuous" else 3, len(goal.prompts)
    tables = sum((drops + 1) + (len(each) if len(each) > 1 else 0) for each in goal.prompts)
    compared = curves + sets - 1
    return searched + tables + baselines + sets * curves + 2 * compared + 2, 3 + compared


def measured_table(
    meter: LossMeter,
    num_layers: int,
    order: Sequence[int],
    budgets: Sequence[int],
    settings: CalibrationSettings,
    prompt: PromptDepth,
) -> LossTable:
    """Losses at each of the budgets under a drop order and a prompt set."""
    schedules = [_without(num_layers, order[: num_layers - budget], settings, prompt) for budget in budgets]
    return LossTable(meter.counts, dict(zip(budgets, meter.sums(schedules), strict=True)))


def _best_set(
    sets: Mapping[PromptDepth, int], meter: LossMeter, layers: int, order: Sequence[int], settings: CalibrationSettings
) -> PromptDepth:
    """Of prompt sets of one depth, the one that loses least with the layers that are in reach with it."""
    if len(sets) == 1:
        return next(iter(sets))
    flat = {prompt: _without(layers, order[: layers - most], settings, prompt) for prompt, most in sets.items()}
    return min(sets, key=lambda prompt: meter.losses([flat[prompt]])[0])


def _without(
    num_layers: int, gone: Sequence[int], settings: CalibrationSettings, prompt: PromptDepth = "full"
) -> Schedule:
    return Schedule(num_layers, tuple(gone), (num_layers - len(gone),), settings.warmup_layers, prompt)


def _curves(
    settings: CalibrationSettings,
    goal: Goal,
    table: LossTable,
    starts: Sequence[int],
    order: tuple[int, ...],
    name: str,
    prompt: PromptDepth,
) -> list[Schedule]:
    """Curves under the calibrated order and a prompt set within the limit: solved, flat, and the paper's."""
    workload = goal.workload
    ends = [*starts[1:], len(workload.steps)]
    losses = table.by_bucket(starts)
    costs = [
        {budget: sum(workload.seconds_at(p, budget) for p in range(first, end)) for budget in table.sums}
        for first, end in zip(starts, ends, strict=True)
    ]

    def schedule(budgets: tuple[int, ...], label: str) -> Schedule:
        return Schedule(workload.cost.num_layers, order, budgets, settings.warmup_layers, name=label).with_prompt(
            prompt
        )

    # What prompts cost depends on the layers of position 0, which the first bucket sets.
    costs[0] = {budget: cost + workload.prompts_seconds(schedule((budget,), "")) for budget, cost in costs[0].items()}
    found: list[Schedule] = []
    if (flat := best_flat(losses, costs, goal.limit)) is not None:
        found.append(schedule((flat,), f"{name}-flat"))
    if settings.use == "lockstep":
        if (curve := best_curve(losses, costs, goal.limit)) is not None:
            lengths = [end - first for first, end in zip(starts, ends, strict=True)]
            budgets = [b for b, length in zip(curve, lengths, strict=True) for _ in range(length)]
            found.append(schedule(_cut(budgets, goal.seq_len), f"{name}-solved"))
        if min(goal.paper.budgets) >= goal.least and prompt == goal.paper.prompt:
            linear = schedule(goal.paper.budgets, f"{name}-linear")
            found += [linear] if workload.seconds(linear) <= goal.limit * SLACK else []
    return found


def _cut(budgets: Sequence[int], seq_len: int) -> tuple[int, ...]:
    """The list without what the last budget says anyway, but not shorter than `seq_len`."""
    end = len(budgets)
    while end > seq_len and budgets[end - 1] == budgets[end - 2]:
        end -= 1
    return tuple(budgets[:end])


def _verdict(
    schedule: Schedule, settings: CalibrationSettings, goal: Goal, meter: LossMeter, held_out: LossMeter | None
) -> Verdict:
    budgets, workload = sorted(set(schedule.budgets)), goal.workload
    table = measured_table(meter, schedule.num_layers, schedule.drop_order, budgets, settings, schedule.prompt)
    wall = settings.target_speedup is not None
    return Verdict(
        schedule,
        workload.speedup(schedule),
        workload.mean_layers(schedule),
        table.predict(schedule.budgets),
        meter.losses([schedule])[0],
        None if held_out is None else held_out.losses([schedule])[0],
        replace(workload, whole=True).speedup(schedule) if wall else None,
        replace(workload, whole=False).speedup(schedule) if wall else None,
    )
