"""The search of a calibration: block influence, the depth that the target leaves, and the prompt layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from skipdecode.common.progress import note
from skipdecode.cost.model import TextCost
from skipdecode.data.batches import IGNORE, batches_of
from skipdecode.data.examples import Example
from skipdecode.errors import FitError
from skipdecode.learning.fitting import Fitter
from skipdecode.learning.goal import Goal
from skipdecode.learning.meter import LossMeter, by_length, measuring
from skipdecode.learning.settings import CalibrationSettings
from skipdecode.models.attach import Attachment
from skipdecode.models.families import decoder_layers
from skipdecode.models.fit import Fit
from skipdecode.models.forward import response_logits
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.schedule import Schedule
from skipdecode.schedule.order import lent_order

Meters = Callable[[Fit | None], tuple[LossMeter, LossMeter | None]]


@dataclass(frozen=True)
class Found:
    """What was learned."""

    schedule: Schedule  # of the schedules in the learned order, the one whose prompt set measured best
    order: tuple[int, ...]  # the learned drop order
    influence: tuple[float, ...]  # the block influence of each layer
    # Full depth, the paper's schedule, evenly spaced layers, the other numbers of prompt layers, and `schedule`, each
    # with its losses and speed-ups; see `_verdict`.
    verdicts: tuple[dict[str, Any], ...]
    fit: Fit | None = None  # the fit of `schedule`

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every measurement."""
        return {
            "schedule": self.schedule.to_dict(),
            "order": list(self.order),
            "block_influence": list(self.influence),
            "verdicts": list(self.verdicts),
        }


def search_model(
    settings: CalibrationSettings,
    goal: Goal,
    loaded: LoadedModel,
    learn: list[Example],
    check: list[Example],
    fitter: Fitter | None,
    file: Path,
    until: float = math.inf,
) -> Found:
    """`search` on records to learn from and held-out records; without a fit if the model cannot be fitted.

    `file` keeps the measurements of an interrupted run. `until`: see `search`.
    """
    size = settings.batch_size
    with measuring(loaded, {"learn": learn, "held out": check}, size, file) as (attachment, meters_of, bar):

        def meters(fit: Fit | None) -> tuple[LossMeter, LossMeter | None]:
            result = meters_of(fit)
            bar.unpause()  # after the influence of layers, or a fit
            return result["learn"], result.get("held out")

        counts = trials(settings, goal, fitter is not None), meters(None)
        bar.reset(total=sum(wanted * meter.batches for wanted, meter in zip(*counts, strict=True) if meter))
        influence = block_influence(attachment, learn, batch_size=size)
        try:
            result = search(settings, goal, influence, meters, fitter, until)
        except FitError as e:
            note(f"no fit: {e}")
            result = search(settings, goal, influence, meters, until=until)
        bar.total = bar.n
    return result


def search(
    settings: CalibrationSettings,
    goal: Goal,
    influence: Sequence[float],
    meters: Meters,
    fitter: Fitter | None = None,
    until: float = math.inf,
) -> Found:
    """Learn the prompt set, and measure the schedule next to the baselines.

    `influence`: block influence of each layer; the layers go in its order. `meters`: measure, with a fit or none, the
    records to learn from and those held out. With a `fitter`, the schedule, but no baseline, gets the fit of all
    candidates. `until`: reading of `time.perf_counter()` after which no further prompt set is compared.

    Raises FitError, DivergedError: see `Fitter.fit` and `LossMeter.losses`.
    """
    layers = goal.workload.cost.num_layers
    ranked = sorted(range(settings.warmup_layers, layers - 1), key=lambda layer: (influence[layer], layer))
    order = lent_order(ranked, goal.shared)[: layers - goal.least]
    sets = [[goal.schedule(order, prompt) for prompt in of_depth] for of_depth in goal.prompts]
    every = list(chain(*sets))
    fitted = [schedule for schedule in every if not schedule.is_full]
    fit = fitter.fit(fitted) if fitter is not None and fitted else None
    measured = _losses(every, meters(fit)[0], until)
    known = [[schedule for schedule in of_depth if schedule in measured] for of_depth in sets]
    tried = [min(of_depth, key=measured.__getitem__) for of_depth in known if of_depth]
    tried.sort(key=lambda schedule: (measured[schedule], goal.workload.seconds(schedule)))
    result, *others = (_named(schedule, settings) for schedule in tried)
    bare = [Schedule.full(layers), goal.paper, goal.even] if settings.baselines else []
    own = None if fit is None or result.is_full else fit.of_schedule(result)
    if own is not None and settings.baselines:
        bare.append(replace(result, name=f"{result.name}, without its fit"))
    verdicts = [_verdict(s, settings, goal.unfitted, *meters(None)) for s in bare]
    verdicts += [_verdict(s, settings, goal.workload, *meters(fit)) for s in (*others, result)]
    return Found(result, order, tuple(influence), tuple(verdicts), own)


def _losses(schedules: Sequence[Schedule], meter: LossMeter, until: float) -> dict[Schedule, float]:
    """The loss of each schedule, of the first ones if the time is over."""
    losses: dict[Schedule, float] = {}
    for schedule in schedules:
        if losses and time.perf_counter() > until:
            note(f"the time for choosing layers is over: {len(losses)} of {len(schedules)} candidates are compared")
            break
        losses[schedule] = meter.loss(schedule)
    return losses


def _named(schedule: Schedule, settings: CalibrationSettings) -> Schedule:
    nominal = settings.nominal_speedup
    if nominal is None:
        return schedule.named_by_layers("calibrated")
    return replace(schedule, name=f"calibrated-{nominal:g}x", family="calibrated")


def trials(settings: CalibrationSettings, goal: Goal, fitted: bool) -> tuple[int, int]:
    """About how many schedules `search` measures on the records, and on those held out."""
    verdicts = settings.baselines * (3 + fitted) + len(goal.prompts)
    return sum(map(len, goal.prompts)) + verdicts, verdicts


def _verdict(
    schedule: Schedule, settings: CalibrationSettings, workload: TextCost, meter: LossMeter, held_out: LossMeter | None
) -> dict[str, Any]:
    """A schedule with its losses per response token, on the records and on those held out, and its speed-ups.

    `speedup` is over full depth on texts as long as the records: of what the target counts, in time as the cost model
    has it, or in layers for a nominal target, which has no other two.
    """
    verdict: dict[str, Any] = {
        "schedule": schedule.to_dict(),
        "name": schedule.name,
        "prompt_layers": len(schedule.prompt_layers()),
        "speedup": workload.speedup(schedule),
        "mean_layers": workload.mean_layers(schedule),
        "measured": meter.loss(schedule),
        "held_out": None if held_out is None else held_out.loss(schedule),
    }
    for name, whole in (("request_speedup", True), ("decode_speedup", False)):
        timed = None if settings.target_speedup is None else replace(workload, whole=whole)
        verdict[name] = timed and timed.speedup(schedule)
    return verdict


def block_influence(attachment: Attachment, examples: Sequence[Example], *, batch_size: int) -> tuple[float, ...]:
    """How much each layer turns the hidden states, from one full-depth pass; 0 for a layer that changes nothing.

    Source: ShortGPT (arXiv 2403.03853), section 3.2: 1 - cosine between a layer's input and output, averaged over
    tokens; here over the response tokens that are fed.
    """
    model, totals, tokens = attachment.model, dict[int, float](), 0
    layers = list(decoder_layers(model))
    fed = torch.zeros(0)  # marks the tokens of a batch that count

    def watch(index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before: Tensor = args[0] if args else kwargs["hidden_states"]
        after: Tensor = output[0] if isinstance(output, tuple) else output
        cosines = functional.cosine_similarity(before[fed].double(), after[fed].double(), dim=-1)
        totals[index] = totals.get(index, 0.0) + float(cosines.sum())

    handles = [layer.register_forward_hook(partial(watch, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        with torch.inference_mode(), attachment.paused():
            for each in batches_of(sorted(examples, key=by_length), batch_size):
                batch = each.to(model.device)
                # A token is fed where the next column has a target; column 0 of the targets belongs to the prompt.
                fed = functional.pad(batch.targets[:, 1:] != IGNORE, (batch.prompt_length, 0))
                tokens += int(fed.sum())
                response_logits(model, batch, attached=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(1 - totals.get(index, 0.0) / max(1, tokens) for index in range(len(layers)))
