"""A calibration from records to a schedule: the order, the depth that the target leaves, and the prompt set."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from skipdecode.calibration.fitting import Fitter
from skipdecode.calibration.goal import Goal
from skipdecode.calibration.meter import LossMeter, measuring
from skipdecode.calibration.order import Round, block_influence, greedy_order, greedy_trials
from skipdecode.calibration.settings import CalibrationSettings, FitOptions
from skipdecode.common.progress import note
from skipdecode.cost.solve import TextCost
from skipdecode.data.prompts import Example
from skipdecode.errors import FitError
from skipdecode.models.fit import Fit
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.schedule import Schedule

_TOKENS_A_COLUMN = 4
Meters = Callable[[Fit | None], tuple[LossMeter, LossMeter | None]]


def draw_records(
    examples: Sequence[Example], records: int, held_out: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Records to learn from, and held-out records with other prompts; the same for the same seed."""
    by_prompt: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        by_prompt.setdefault(example.prompt, []).append(example)
    groups = list(by_prompt.values())
    random.Random(seed).shuffle(groups)
    learn, rest = _take(groups, records)
    check, _ = _take(rest, held_out)
    if len(check) < held_out:
        note(f"only {len(check)} of {held_out} records are held out: there are not enough other prompts")
    return learn, check


def _take(groups: Sequence[list[Example]], count: int) -> tuple[list[Example], list[list[Example]]]:
    """The first `count` records, from as many prompts as possible, and the groups of which none was taken."""
    taken: list[Example] = []
    for rank in range(max(map(len, groups), default=0)):
        for used, group in enumerate(groups):
            if len(taken) == count:
                return taken, list(groups[used if rank == 0 else len(groups) :])
            if rank < len(group):
                taken.append(group[rank])
    return taken, []


def records_for_fit(
    examples: Sequence[Example],
    learn: Sequence[Example],
    check: Sequence[Example],
    settings: FitOptions,
    hidden_size: int,
) -> list[Example]:
    """Records to fit on, in the order of their lengths: those to learn from, then others; none has a held-out prompt.

    Records are taken up to the tokens of the settings, or for long prompts until their responses have
    `_TOKENS_A_COLUMN` tokens for each column of a bridge.
    """
    kept = {example.prompt for example in check}
    others = [e for e in examples if e.prompt not in kept and e not in learn]
    taken: list[Example] = []
    tokens = answers = 0
    for example in [*learn, *others][: settings.fit_records]:
        if tokens >= settings.fit_tokens and answers >= _TOKENS_A_COLUMN * hidden_size:
            break
        taken.append(example)
        tokens += len(example.prompt) + len(example.response)
        answers += len(example.response)
    return sorted(taken, key=lambda e: (len(e.prompt), len(e.response)))


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
    """What was learned: the drop order, the schedule, and its fit.

    `schedule` is, of the linear (or flat) ones in the learned order, the one whose prompt set measured best. `rounds`
    are the greedy search, empty for another method; `influence` is the block influence of each layer. `verdicts` are on
    full depth, the paper's, evenly spaced, the other numbers of prompt layers, and the calibrated schedule.
    """

    schedule: Schedule
    order: tuple[int, ...]
    rounds: tuple[Round, ...]
    influence: tuple[float, ...]
    verdicts: tuple[Verdict, ...]
    fit: Fit | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every measurement."""
        return {
            "schedule": self.schedule.to_dict(),
            "order": list(self.order),
            "rounds": [r.to_dict() for r in self.rounds],
            "block_influence": list(self.influence),
            "verdicts": [v.to_dict() for v in self.verdicts],
        }


def calibrate_model(
    settings: CalibrationSettings,
    goal: Goal,
    loaded: LoadedModel,
    learn: list[Example],
    check: list[Example],
    fitter: Fitter | None,
    file: Path,
) -> Calibration:
    """`calibrate` on records to learn from and held-out records; without a fit if the model cannot be fitted.

    `file` keeps the measurements of an interrupted run.
    """
    wall, nominal = settings.target_speedup, settings.nominal_speedup
    name = f"calibrated-{nominal:g}x" if wall is None else f"calibrated-{wall:g}x-wall"
    size = settings.batch_size
    with measuring(loaded, {"learn": learn, "held out": check}, size, file) as (attachment, meters_of, bar):

        def meters(fit: Fit | None) -> tuple[LossMeter, LossMeter | None]:
            found = meters_of(fit)
            bar.unpause()  # after the influence of layers, or a fit
            return found["learn"], found.get("held out")

        counts = trials(settings, goal, fitter is not None), meters(None)
        bar.reset(total=sum(wanted * meter.batches for wanted, meter in zip(*counts, strict=True) if meter))
        influence = block_influence(attachment, learn, batch_size=size)
        try:
            found = calibrate(settings, goal, influence, meters, fitter, name=name)
        except FitError as e:
            note(f"no fit: {e}")
            found = calibrate(settings, goal, influence, meters, name=name)
        bar.total = bar.n
    return found


def calibrate(
    settings: CalibrationSettings,
    goal: Goal,
    influence: Sequence[float],
    meters: Meters,
    fitter: Fitter | None = None,
    *,
    name: str = "calibrated",
) -> Calibration:
    """Learn the order and the prompt set, and measure the schedule next to the baselines.

    Parameters
    ----------
    influence : sequence of float
        Block influence of each layer: the order itself, or what decides between equals.
    meters : callable
        Gives what measures the records to learn from, and those held out, with a fit or with none.
    fitter : Fitter, optional
        The order is then learned with a bridge over each layer that is left out, the prompt set is chosen with the fit
        of all candidates, and the schedule gets that fit. Baselines have none.
    name : str
        Name of the calibrated schedule.

    Raises
    ------
    FitError, DivergedError
        See `Fitter.fit` and `LossMeter.losses`.
    """
    layers = goal.workload.cost.num_layers
    rounds: list[Round] = []
    if settings.method == "greedy":
        rounds = _greedy_rounds(settings, goal, influence, meters, fitter)
        order = tuple(r.dropped for r in rounds)
    else:
        ranked = sorted(_droppable(settings, goal), key=lambda layer: (influence[layer], layer))
        order = tuple(ranked[: layers - goal.least])
    sets = [[goal.schedule(order, prompt) for prompt in of_depth] for of_depth in goal.prompts]
    every = list(chain(*sets))
    fitted = [schedule for schedule in every if not schedule.is_full]
    fit = fitter.fit(fitted) if fitter is not None and fitted else None
    measured = dict(zip(every, meters(fit)[0].losses(every), strict=True))
    tried = [min(of_depth, key=measured.__getitem__) for of_depth in sets]
    tried.sort(key=lambda schedule: (measured[schedule], goal.workload.seconds(schedule)))
    result = replace(tried[0], name=name)
    others = [replace(s, name=f"{name}, {len(s.prompt_layers())} prompt layers") for s in tried[1:]]
    bare = [Schedule.full(layers), goal.paper, goal.even]
    own = None if fit is None or result.is_full else fit.of_schedule(result)
    if own is not None:
        bare.append(replace(result, name=f"{name}, without its fit"))
    verdicts = [_verdict(s, settings, goal.unfitted, *meters(None)) for s in bare]
    verdicts += [_verdict(s, settings, goal.workload, *meters(fit)) for s in (*others, result)]
    return Calibration(result, order, tuple(rounds), tuple(influence), tuple(verdicts), own)


def trials(settings: CalibrationSettings, goal: Goal, fitted: bool) -> tuple[int, int]:
    """About how many schedules `calibrate` measures on the records, and on those held out."""
    searched = 0
    if settings.method == "greedy":
        drops = goal.workload.cost.num_layers - goal.least
        searched = greedy_trials(len(_droppable(settings, goal)), drops, settings.candidates)
    verdicts = 3 + fitted + len(goal.prompts)
    return searched + sum(map(len, goal.prompts)) + verdicts, verdicts


def _droppable(settings: CalibrationSettings, goal: Goal) -> range:
    return range(settings.warmup_layers, goal.workload.cost.num_layers - 1)


def _greedy_rounds(
    settings: CalibrationSettings, goal: Goal, influence: Sequence[float], meters: Meters, fitter: Fitter | None
) -> list[Round]:
    layers, droppable = goal.workload.cost.num_layers, _droppable(settings, goal)
    meter, _ = meters(None if fitter is None else fitter.fit_alone(droppable))

    def measure(sets: Sequence[tuple[int, ...]]) -> list[float]:
        warmup = settings.warmup_layers
        return meter.losses([Schedule(layers, gone, (layers - len(gone),), warmup) for gone in sets])

    return greedy_order(measure, droppable, layers - goal.least, settings.candidates, dict(enumerate(influence)))


def _verdict(
    schedule: Schedule, settings: CalibrationSettings, workload: TextCost, meter: LossMeter, held_out: LossMeter | None
) -> Verdict:
    """A schedule with its losses on the records, and on those held out, as the cost model has its speed-ups."""
    wall = settings.target_speedup is not None
    return Verdict(
        schedule,
        workload.speedup(schedule),
        workload.mean_layers(schedule),
        meter.losses([schedule])[0],
        None if held_out is None else held_out.losses([schedule])[0],
        replace(workload, whole=True).speedup(schedule) if wall else None,
        replace(workload, whole=False).speedup(schedule) if wall else None,
    )
