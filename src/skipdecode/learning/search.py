"""The search of a calibration: the drop order, the depth that the target leaves, and the prompt layers."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from skipdecode.common.progress import note, progress_bar
from skipdecode.common.resume import ANEW, ResumeLog
from skipdecode.data.batches import IGNORE, Batch, batches_of
from skipdecode.data.examples import Example
from skipdecode.errors import FitError
from skipdecode.learning.fitting import check_finite
from skipdecode.learning.goal import Goal
from skipdecode.learning.objective import Objective
from skipdecode.learning.settings import CalibrationSettings
from skipdecode.models.attach import Attachment
from skipdecode.models.families import decoder_layers
from skipdecode.models.fit import Fit
from skipdecode.models.forward import response_logits
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.schedule import PromptDepth, Schedule
from skipdecode.schedule.order import lent_order

MakeFit = Callable[[Sequence[Schedule], float], Fit]
_FIT_SHARE = 0.7  # of the time of a group; its schedules are compared in the rest
_LEARNED, _PAPER = "calibrated", "paper"
"""Drop orders, and the families of schedules in them: by block influence, and from the bottom up."""
_ALIKE = 1.05
"""Ratio of losses before tuning that says nothing of those after it, for which the layers of new tokens count."""


@dataclass(frozen=True)
class Candidate:
    """A schedule in one of the drop orders, with the records' cross-entropy per response token under it.

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
    """The schedules that were compared, the chosen one first, then by loss, and what led to them."""

    candidates: tuple[Candidate, ...]
    order: tuple[int, ...]  # the drop order by block influence
    influence: tuple[float, ...]  # the block influence of each layer
    fit: Fit | None  # of the first candidate's schedule

    @property
    def schedule(self) -> Schedule:
        """The chosen schedule."""
        return self.candidates[0].schedule


class LossMeter:
    """Measures schedules on batches of records.

    Each measurement changes the schedule and the fit of the attachment. A loss that the `store` has, of the same
    schedule with an equal fit, is not measured again. `advance` is called with the number of batches that are done.
    """

    def __init__(
        self, attachment: Attachment, batches: Sequence[Batch], store: ResumeLog, advance: Callable[[int], object]
    ) -> None:
        self._attachment, self._batches, self._store, self._advance = attachment, batches, store, advance

    def loss(self, schedule: Schedule, fit: Fit | None = None) -> float:
        """Cross-entropy per response token under a schedule; raises DivergedError if a loss is not finite."""
        key = json.dumps([schedule.to_dict(), fit and fit.digest()])
        stored = self._store.get(key)
        if stored is not None:
            self._advance(len(self._batches))
            return float(stored)
        self._attachment.schedule, self._attachment.fit = schedule, fit
        loss = sum(map(self._sum, self._batches)) / sum(batch.response_tokens for batch in self._batches)
        self._store.put(key, loss)
        return loss

    @torch.inference_mode()
    def _sum(self, batch: Batch) -> float:
        """The sum of a batch's losses."""
        model = self._attachment.model
        total = Objective()(model, batch.to(model.device)).cross_entropy
        check_finite(total, batch.ids)
        self._advance(1)
        return float(total)


def search_model(
    settings: CalibrationSettings,
    goal: Goal,
    loaded: LoadedModel,
    records: list[Example],
    make_fit: MakeFit | None,
    file: Path,
    until: float,
) -> SearchResult:
    """`search` on records; `file` keeps the measurements of an interrupted run."""
    batches = batches_of(sorted(records, key=lambda e: (len(e.response), len(e.prompt), e.id)), settings.batch_size)
    texts = json.dumps([[example.prompt, example.response] for example in records])
    identity = {
        "model": loaded.checkpoint.name,
        "dtype": str(loaded.model.dtype),
        "records": hashlib.sha256(texts.encode()).hexdigest(),
        "batch_size": settings.batch_size,
        "checkpoint": checkpoint_digest(loaded),
    }
    loaded.model.eval()
    candidates = sum(len(prompts) for _, prompts in groups_by_fit(goal.prompts))
    with (
        closing(ResumeLog(file, identity, what="measurements", remedy=ANEW)) as store,
        progress_bar(candidates * len(batches), "batch", name="measuring") as bar,
        Attachment(loaded.model, Schedule.full(loaded.checkpoint.num_layers)) as attachment,
    ):
        meter = LossMeter(attachment, batches, store, bar.update)

        def measure(schedule: Schedule, fit: Fit | None) -> float:
            bar.unpause()  # after the influence of layers, or a fit
            return meter.loss(schedule, fit)

        return search(settings, goal, block_influence(attachment, batches), measure, make_fit, until)


def search(
    settings: CalibrationSettings,
    goal: Goal,
    influence: Sequence[float],
    measure: Callable[[Schedule, Fit | None], float],
    make_fit: MakeFit | None = None,
    until: float = math.inf,
) -> SearchResult:
    """Order the layers by influence and from the bottom up, fit their maps, and compare the prompt sets by their loss.

    `influence`: block influence of each layer. `measure`: returns the loss of a schedule with a fit. `make_fit`:
    returns the fit of the schedules of a group of `groups_by_fit`, by a reading of the clock. `until`: reading of
    `time.perf_counter()` after which no further prompt set is compared.

    Among losses of at most `_ALIKE` times the smallest one, the schedule is chosen whose new tokens run most layers.

    Raises DivergedError: see `skipdecode.learning.fitting.make_fit` and `LossMeter.loss`.
    """
    layers = goal.workload.cost.num_layers
    ranked = sorted(range(settings.warmup_layers, layers - 1), key=lambda layer: (influence[layer], layer))
    whole = {_LEARNED: lent_order(ranked, goal.shared), _PAPER: goal.depths.order}
    orders = {name: order[: layers - goal.least] for name, order in whole.items()}
    groups = groups_by_fit(goal.prompts)
    decoding = None if settings.target_speedup is None else replace(goal.workload, whole=False)
    tried = list[tuple[Candidate, Fit | None]]()
    for number, (order, prompts) in enumerate(groups):
        now = time.perf_counter()
        end = now + (until - now) / (len(groups) - number)
        schedules = [goal.schedule(orders[order], prompt) for prompt in prompts]
        fit = None if make_fit is None else _fit(make_fit, schedules, now + _FIT_SHARE * (end - now))
        for compared, schedule in enumerate(schedules):
            if compared and time.perf_counter() > end:
                note(f"the time for choosing layers is over: {compared} of {len(schedules)} candidates are compared")
                break
            candidate = Candidate(
                _named(schedule, order, settings),
                measure(schedule, fit),
                goal.workload.speedup(schedule),
                None if decoding is None else decoding.speedup(schedule),
                goal.workload.mean_layers(schedule),
            )
            tried.append((candidate, fit))
    tried.sort(key=lambda each: (each[0].loss, goal.workload.seconds(each[0].schedule)))
    alike = [each for each in tried if each[0].loss <= _ALIKE * tried[0][0].loss]
    best, fit = chosen = max(alike, key=lambda each: each[0].mean_layers)
    tried.sort(key=lambda each: each is not chosen)  # the chosen one first
    own = None if fit is None or best.schedule.is_full else fit.of_schedule(best.schedule)
    return SearchResult(tuple(candidate for candidate, _ in tried), orders[_LEARNED], tuple(influence), own)


def groups_by_fit(prompts: Sequence[PromptDepth]) -> list[tuple[str, list[PromptDepth]]]:
    """Group prompt sets that one fit serves, each with the name of its drop order.

    Prompts that run the first token's layers take its bridges, others none. In the paper's order the first token runs
    few of the layers that prompts need, so these sets are not tried there.
    """
    own: list[PromptDepth] = [prompt for prompt in prompts if prompt != "max_exit"]
    at_exit: list[PromptDepth] = [prompt for prompt in prompts if prompt == "max_exit"]
    return [group for group in ((_PAPER, own), (_LEARNED, own), (_LEARNED, at_exit)) if group[1]]


def _fit(make_fit: MakeFit, schedules: Sequence[Schedule], until: float) -> Fit | None:
    """The fit of schedules; None if they skip nothing or cannot be fitted."""
    fitted = [schedule for schedule in schedules if not schedule.is_full]
    try:
        return make_fit(fitted, until) if fitted else None
    except FitError as e:
        note(f"no fit: {e}")
        return None


def _named(schedule: Schedule, family: str, settings: CalibrationSettings) -> Schedule:
    nominal = settings.nominal_speedup
    if nominal is None:
        return schedule.named_by_layers(family)
    return replace(schedule, name=f"{family}-{nominal:g}x", family=family)


def block_influence(attachment: Attachment, batches: Sequence[Batch]) -> tuple[float, ...]:
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
            for batch in (each.to(model.device) for each in batches):
                # A token is fed where the next column has a target; column 0 of the targets belongs to the prompt.
                fed = functional.pad(batch.targets[:, 1:] != IGNORE, (batch.prompt_length, 0))
                tokens += int(fed.sum())
                response_logits(model, batch, attached=False)
    finally:
        for handle in handles:
            handle.remove()
    return tuple(1 - totals.get(index, 0.0) / max(1, tokens) for index in range(len(layers)))
