"""A calibration from records to a schedule: the order, the depth that the target leaves, and the prompt set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skipdecode.calibration.goal import Goal
from skipdecode.calibration.meter import LossMeter
from skipdecode.calibration.order import Round, greedy_order, greedy_trials
from skipdecode.calibration.settings import CalibrationSettings
from skipdecode.schedule import Schedule

__all__ = ["Calibration", "Verdict", "calibrate", "trials", "verdict"]


@dataclass(frozen=True)
class Verdict:
    """A schedule with its measured losses.

    Losses are teacher-forced cross-entropy per response token. `speedup` is over full depth on texts as long as the
    records: of what the target counts, wall-clock as the cost model has it, or in layers for a nominal target, which
    has no other two.
    """

    schedule: Schedule
    speedup: float
    mean_layers: float
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
    """What was learned: the drop order and the schedule.

    `schedule` is, of the linear (or flat) ones in the learned order, the one whose prompt set measured best. `rounds`
    are the greedy search, empty for another method; `influence` is the block influence of each layer. `verdicts` are on
    full depth, the paper's, evenly spaced, the other numbers of prompt layers, and the calibrated schedule.
    """

    schedule: Schedule
    order: tuple[int, ...]
    rounds: tuple[Round, ...]
    influence: tuple[float, ...]
    verdicts: tuple[Verdict, ...]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every measurement."""
        return {
            "schedule": self.schedule.to_dict(),
            "order": list(self.order),
            "rounds": [r.to_dict() for r in self.rounds],
            "block_influence": list(self.influence),
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
    """Learn the order and the prompt set, and measure the schedule next to the baselines.

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
    tried: dict[Schedule, float] = {}
    for sets in goal.prompts:
        losses = dict(zip(made := [goal.schedule(order, prompt) for prompt in sets], meter.losses(made), strict=True))
        best = min(made, key=losses.__getitem__)
        tried[best] = losses[best]
    ranked = sorted(tried, key=lambda schedule: (tried[schedule], goal.workload.seconds(schedule)))
    result = replace(ranked[0], name=name)
    others = [replace(s, name=f"{name}, {len(s.prompt_layers())} prompt layers") for s in ranked[1:]]
    compared = [Schedule.full(layers), goal.paper, goal.even, *others, result]
    verdicts = [verdict(s, settings, goal, meter, held_out) for s in compared]
    return Calibration(result, order, tuple(rounds), tuple(influence), tuple(verdicts))


def trials(settings: CalibrationSettings, goal: Goal) -> tuple[int, int]:
    """About how many schedules `calibrate` measures on the records, and on those held out."""
    layers = goal.workload.cost.num_layers
    searched = 0
    if settings.method == "greedy":
        candidates = max(0, layers - 1 - settings.warmup_layers)
        searched = greedy_trials(candidates, layers - goal.least, settings.candidates)
    verdicts = 3 + len(goal.prompts)
    return searched + sum(map(len, goal.prompts)) + verdicts, verdicts


def _without(num_layers: int, gone: Sequence[int], settings: CalibrationSettings) -> Schedule:
    return Schedule(num_layers, tuple(gone), (num_layers - len(gone),), settings.warmup_layers)


def verdict(
    schedule: Schedule, settings: CalibrationSettings, goal: Goal, meter: LossMeter, held_out: LossMeter | None
) -> Verdict:
    """A schedule with its losses on the records, and on those held out, as the goal's cost model has its speed-ups."""
    workload, wall = goal.workload, settings.target_speedup is not None
    return Verdict(
        schedule,
        workload.speedup(schedule),
        workload.mean_layers(schedule),
        meter.losses([schedule])[0],
        None if held_out is None else held_out.losses([schedule])[0],
        replace(workload, whole=True).speedup(schedule) if wall else None,
        replace(workload, whole=False).speedup(schedule) if wall else None,
    )
