"""Teacher-forced losses of many schedules on the same records, no gradients.

Schedules whose prompts run the same layers share the prompt's forward and its keys and values; only the responses run
again for each, and, where prompts do not run all layers, their last token, which runs those of position 0 too. Equal to
the parallel form without a cache, which tests hold.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.common.progress import progress_bar
from skipdecode.common.resume import ANEW, ResumeLog
from skipdecode.data.batches import IGNORE, Batch, batches_of
from skipdecode.data.examples import Example
from skipdecode.errors import DivergedError
from skipdecode.models.attach import Attachment
from skipdecode.models.cache import SkipCache
from skipdecode.models.fit import Fit
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.models.release import model_cache_name
from skipdecode.schedule import Schedule

PartMeters = Callable[[Fit | None], dict[str, "LossMeter"]]
"""From a fit to the meter of each part of the records."""

_KEPT_BYTES = 2**30
"""Keys and values of prompts of one set that are kept between calls; later batches' prompts run once a call."""
_SHOWN = 3


def check_finite(values: Tensor, records: Sequence[str]) -> None:
    """Raise DivergedError if a state or a loss of these records is not finite."""
    if not values.isfinite().all():
        shown = ", ".join(records[:_SHOWN]) + (", …" if len(records) > _SHOWN else "")
        raise DivergedError(f"the model's arithmetic overflows on records {shown}: check the model's weights")


def by_length(example: Example) -> tuple[int, int, str]:
    """The order of records in batches."""
    return len(example.response), len(example.prompt), example.id


class LossMeter:
    """Measures schedules on records, which go through the model `batch_size` at a time.

    The attachment's schedule changes with every measurement, and its fit to `fit`. What was measured before, of these
    records under the name `part` with an equal fit in the `store`, is not measured again. `advance` is told after each
    batch under a schedule.
    """

    def __init__(
        self,
        attachment: Attachment,
        examples: Sequence[Example],
        store: ResumeLog,
        *,
        part: str,
        batch_size: int,
        advance: Callable[[], object],
        fit: Fit | None = None,
    ) -> None:
        self._batches = batches_of(sorted(examples, key=by_length), batch_size)
        self._tokens = sum(len(example.response) for example in examples)
        self._attachment = attachment
        self._store = store
        self._part = part if fit is None else f"{part}, fit {fit.digest()}"
        self._fit = fit
        self._advance = advance
        self._prompts: dict[int, _SharedPrompt] = {}

    @property
    def batches(self) -> int:
        """Forward passes that measure one schedule."""
        return len(self._batches)

    def losses(self, schedules: Sequence[Schedule]) -> list[float]:
        """Cross-entropy per response token of each schedule; raises DivergedError if a loss is not finite."""
        found = [self._batch(number, batch, schedules) for number, batch in enumerate(self._batches)]
        return [sum(chain(*sums)) / self._tokens for sums in zip(*found, strict=True)]

    def _batch(self, number: int, batch: Batch, schedules: Sequence[Schedule]) -> list[list[float]]:
        """Summed losses of each record under each schedule."""
        keys = [f"{self._part}/{number}/{_behaviour(schedule)}" for schedule in schedules]
        forced: _SharedPrompt | None = None
        self._attachment.fit = self._fit
        for key, schedule in zip(keys, schedules, strict=True):
            if self._store.get(key) is None:
                with torch.inference_mode():
                    if forced is None or not forced.serves(schedule):
                        forced = self._shared_prompt(number, batch, schedule)
                    self._store.put(key, forced.losses(schedule).sum(1).tolist())
            self._advance()
        return [self._store.get(key) or [] for key in keys]

    def _shared_prompt(self, number: int, batch: Batch, schedule: Schedule) -> _SharedPrompt:
        if not all(kept.serves(schedule) for kept in self._prompts.values()):
            self._prompts.clear()
        if number in self._prompts:
            return self._prompts[number]
        forced = _SharedPrompt(self._attachment, batch.to(self._attachment.model.device), schedule)
        if forced.kv_bytes + sum(kept.kv_bytes for kept in self._prompts.values()) <= _KEPT_BYTES:
            self._prompts[number] = forced
        return forced


@contextmanager
def measuring(
    loaded: LoadedModel, parts: Mapping[str, list[Example]], batch_size: int, file: Path
) -> Iterator[tuple[Attachment, PartMeters, Any]]:
    """The attached model, the meters of each part that has records, and a progress bar; `file` keeps all losses."""
    records = json.dumps([[[e.prompt, e.response] for e in rows] for rows in parts.values()])
    identity = {
        "model": loaded.checkpoint.name,
        "dtype": str(loaded.model.dtype),
        "records": hashlib.sha256(records.encode()).hexdigest(),
        "batch_size": batch_size,
        "checkpoint": checkpoint_digest(loaded),
    }
    kept = ResumeLog(file, identity, what="measurements", remedy=ANEW)
    loaded.model.eval()
    bar = progress_bar(None, "batch", name="measuring")
    full = Schedule.full(loaded.checkpoint.num_layers)
    with closing(kept) as store, bar, Attachment(loaded.model, full) as attachment:
        meter = partial(LossMeter, attachment, store=store, batch_size=batch_size, advance=bar.update)

        @lru_cache(maxsize=1)  # meters keep keys and values of prompts
        def meters(fit: Fit | None) -> dict[str, LossMeter]:
            return {part: meter(rows, part=part, fit=fit) for part, rows in parts.items() if rows}

        yield attachment, meters, bar


class _SharedPrompt:
    """A batch whose prompt has run, where it has a set of its own all but the last token."""

    def __init__(self, attachment: Attachment, batch: Batch, schedule: Schedule) -> None:
        self._attachment, self._batch = attachment, batch
        self._alike = schedule.prompt, schedule.prompt_layers()
        self._cache = attachment.new_cache(batch.prompt_length)
        # With a set of its own it leaves keys and values in every layer, whatever position 0 runs.
        whole = isinstance(schedule.prompt, str)
        attachment.schedule = schedule if whole else replace(Schedule.full(schedule.num_layers), prompt=schedule.prompt)
        self._fed = batch.prompt_length - (not whole)
        logits = self._forward(0, self._fed, self._cache) if self._fed else None
        # Copied, for a view would hold the whole prompt's logits.
        self._first = logits[:, -1:].clone() if whole and logits is not None else None
        self.kv_bytes = self._cache.kv_bytes()

    def serves(self, schedule: Schedule) -> bool:
        """Whether it is the prompt of this schedule too."""
        return self._alike == (schedule.prompt, schedule.prompt_layers())

    def losses(self, schedule: Schedule) -> Tensor:
        """Losses of each record and index of the responses under a schedule, 0 beyond a response."""
        targets, logits = self._batch.targets, self._logits(schedule)
        # Row by row: probabilities of all tokens of a large vocabulary take several times the memory of the logits.
        rows = zip(logits, targets, strict=True)
        each = [functional.cross_entropy(x.float(), y, ignore_index=IGNORE, reduction="none") for x, y in rows]
        losses = torch.stack(each).double()
        check_finite(losses, self._batch.ids)
        return losses

    def _logits(self, schedule: Schedule) -> Tensor:
        """Of every index of the responses, under a schedule."""
        parts = [] if self._first is None else [self._first]
        if self._batch.targets.shape[1] > len(parts):
            self._attachment.schedule = schedule
            # The last response token is not fed: nothing follows it.
            parts.append(self._forward(self._fed, -1, copy.deepcopy(self._cache)))
        return torch.cat(parts, dim=1)

    def _forward(self, start: int, end: int, cache: SkipCache) -> Tensor:
        batch = self._batch
        arguments: dict[str, Any] = {
            "input_ids": batch.input_ids[:, start:end],
            "attention_mask": batch.attention_mask[:, : batch.input_ids[:, :end].shape[1]],
            model_cache_name(self._attachment.model): cache,
            "use_cache": True,
        }
        accepted = inspect.signature(type(self._attachment.model).forward).parameters
        if "position_ids" in accepted:
            arguments["position_ids"] = batch.position_ids[:, start:end]
        if start == 0 and "logits_to_keep" in accepted:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._attachment.model(**arguments).logits
        return logits


def _behaviour(schedule: Schedule) -> str:
    """What a schedule does, its name and unused part left out: the position at which each layer goes; prompt layers."""
    ends = ((layer, schedule.drop_position(layer)) for layer in range(schedule.num_layers))
    prompt = schedule.prompt_layers()
    listed = "" if len(prompt) == schedule.num_layers else f"/{','.join(map(str, prompt))}"
    return ",".join(f"{layer}:{end}" for layer, end in ends if end is not None) + listed
