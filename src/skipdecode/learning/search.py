"""The search of a calibration: block influence, the depth that the target leaves, and the prompt layers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from skipdecode.common.progress import note
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


@dataclass(frozen=True)
class Candidate:
    """A schedule in the learned order, with the records' cross-entropy per response token under it.

    `speedup` is over full depth on texts as long as the records: of whole requests in time, as the cost model has it,
    or of layers for a nominal target, for which `decode_speedup` is None.
    """

    schedule: Schedule
    loss: float
    speedup: float
    decode_speedup: float | None
    mean_layers: float

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        about = {"name": self.schedule.name, "prompt_layers": len(self.schedule.prompt_layers())}
        return about | vars(self) | {"schedule": self.schedule.to_dict()}


@dataclass(frozen=True)
class SearchResult:
    """The schedule of each prompt set, those of the smallest loss first, and what led to them."""

    candidates: tuple[Candidate, ...]
    order: tuple[int, ...]  # the learned drop order
    influence: tuple[float, ...]  # the block influence of each layer
    fit: Fit | None  # of the first candidate's schedule

    @property
    def schedule(self) -> Schedule:
        """The schedule with the smallest loss."""
        return self.candidates[0].schedule

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary of every measurement."""
        return {
            "schedule": self.schedule.to_dict(),
            "order": list(self.order),
            "block_influence": list(self.influence),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }


def search_model(
    settings: CalibrationSettings,
    goal: Goal,
    loaded: LoadedModel,
    records: list[Example],
    fitter: Fitter | None,
    file: Path,
    until: float = math.inf,
) -> SearchResult:
    """`search` on records.

    `file` keeps the measurements of an interrupted run. `until`: see `search`.
    """
    size = settings.batch_size
    with measuring(loaded, records, size, file) as (attachment, meter_of, bar):

        def meter(fit: Fit | None) -> LossMeter:
            bar.unpause()  # after the influence of layers, or a fit
            return meter_of(fit)

        bar.reset(total=len(goal.prompts) * meter_of(None).batches)
        influence = block_influence(attachment, records, batch_size=size)
        return search(settings, goal, influence, meter, fitter, until)


def search(
    settings: CalibrationSettings,
    goal: Goal,
    influence: Sequence[float],
    meter_of: Callable[[Fit | None], LossMeter],
    fitter: Fitter | None = None,
    until: float = math.inf,
) -> SearchResult:
    """Order the layers by influence, fit their maps, and compare the prompt sets by their loss.

    `influence`: block influence of each layer; the layers go in its order. With a `fitter`, candidates whose prompts
    run the first token's layers have one fit, and all others another. `until`: reading of `time.perf_counter()` after
    which no further prompt set is compared.

    Raises DivergedError: see `Fitter.fit` and `LossMeter.loss`.
    """
    layers = goal.workload.cost.num_layers
    ranked = sorted(range(settings.warmup_layers, layers - 1), key=lambda layer: (influence[layer], layer))
    order = lent_order(ranked, goal.shared)[: layers - goal.least]
    groups = _groups_by_fit([goal.schedule(order, prompt) for prompt in goal.prompts])
    losses, fits = dict[Schedule, float](), dict[Schedule, Fit | None]()
    for left, group in zip(range(len(groups), 0, -1), groups, strict=True):
        now = time.perf_counter()
        end = now + (until - now) / left
        fit = None if fitter is None else _fit(replace(fitter, until=end), group)
        losses |= _losses(group, meter_of(fit), end)
        fits |= dict.fromkeys(group, fit)
    tried = sorted(losses, key=lambda schedule: (losses[schedule], goal.workload.seconds(schedule)))
    decoding = None if settings.target_speedup is None else replace(goal.workload, whole=False)
    candidates = [
        Candidate(
            _named(schedule, settings),
            losses[schedule],
            goal.workload.speedup(schedule),
            None if decoding is None else decoding.speedup(schedule),
            goal.workload.mean_layers(schedule),
        )
        for schedule in tried
    ]
    best = candidates[0].schedule
    fit = fits[tried[0]]
    own = None if fit is None or best.is_full else fit.of_schedule(best)
    return SearchResult(tuple(candidates), order, tuple(influence), own)


def _groups_by_fit(schedules: Sequence[Schedule]) -> list[list[Schedule]]:
    """Group schedules that one fit serves: prompts that run what the first token runs take its bridges, others none."""
    by_prompt = {alike: [s for s in schedules if (s.prompt == "max_exit") is alike] for alike in (False, True)}
    return [group for group in by_prompt.values() if group]


def _fit(fitter: Fitter, schedules: Sequence[Schedule]) -> Fit | None:
    """The fit of schedules; None if they skip nothing or cannot be fitted."""
    fitted = [schedule for schedule in schedules if not schedule.is_full]
    try:
        return fitter.fit(fitted) if fitted else None
    except FitError as e:
        note(f"no fit: {e}")
        return None


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
