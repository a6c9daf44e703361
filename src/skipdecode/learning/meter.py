"""Teacher-forced losses of schedules on the same records, no gradients; measured losses are kept on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
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
from skipdecode.models.fit import Fit
from skipdecode.models.forward import response_logits
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.schedule import Schedule

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

    The attachment's schedule changes with every measurement, and its fit to `fit`. What was measured before with an
    equal fit, and is in the `store`, is not measured again. `advance` is told after each batch under a schedule.
    """

    def __init__(
        self,
        attachment: Attachment,
        examples: Sequence[Example],
        store: ResumeLog,
        *,
        batch_size: int,
        advance: Callable[[], object],
        fit: Fit | None = None,
    ) -> None:
        self._batches = batches_of(sorted(examples, key=by_length), batch_size)
        self._tokens = sum(len(example.response) for example in examples)
        self._attachment = attachment
        self._store = store
        self._name = "without a fit" if fit is None else f"fit {fit.digest()}"
        self._fit = fit
        self._advance = advance

    @property
    def batches(self) -> int:
        """Forward passes that measure one schedule."""
        return len(self._batches)

    def loss(self, schedule: Schedule) -> float:
        """Cross-entropy per response token under a schedule; raises DivergedError if a loss is not finite."""
        self._attachment.schedule, self._attachment.fit = schedule, self._fit
        return sum(sum(self._batch(number, schedule)) for number in range(self.batches)) / self._tokens

    def _batch(self, number: int, schedule: Schedule) -> list[float]:
        """Summed losses of each record of a batch."""
        key = f"{self._name}/{number}/{_behaviour(schedule)}"
        sums = self._store.get(key)
        if sums is None:
            sums = self._measured(self._batches[number])
            self._store.put(key, sums)
        self._advance()
        return list(sums)

    @torch.inference_mode()
    def _measured(self, batch: Batch) -> list[float]:
        model = self._attachment.model
        logits, targets = response_logits(model, batch.to(model.device)), batch.targets.to(model.device)
        # Row by row: probabilities of all tokens of a large vocabulary take several times the memory of the logits.
        rows = zip(logits, targets, strict=True)
        each = [functional.cross_entropy(x.float(), y, ignore_index=IGNORE, reduction="none") for x, y in rows]
        losses = torch.stack(each).double()
        check_finite(losses, batch.ids)
        return losses.sum(1).tolist()


@contextmanager
def measuring(
    loaded: LoadedModel, records: list[Example], batch_size: int, file: Path
) -> Iterator[tuple[Attachment, Callable[[Fit | None], LossMeter], Any]]:
    """The attached model, the meter of the records with a fit or none, a progress bar; `file` keeps all losses."""
    texts = json.dumps([[example.prompt, example.response] for example in records])
    identity = {
        "model": loaded.checkpoint.name,
        "dtype": str(loaded.model.dtype),
        "records": hashlib.sha256(texts.encode()).hexdigest(),
        "batch_size": batch_size,
        "checkpoint": checkpoint_digest(loaded),
    }
    log = ResumeLog(file, identity, what="measurements", remedy=ANEW)
    loaded.model.eval()
    bar = progress_bar(None, "batch", name="measuring")
    full = Schedule.full(loaded.checkpoint.num_layers)
    with closing(log) as store, bar, Attachment(loaded.model, full) as attachment:
        meter = partial(LossMeter, attachment, records, store, batch_size=batch_size, advance=bar.update)
        yield attachment, lambda fit: meter(fit=fit), bar


def _behaviour(schedule: Schedule) -> str:
    """What a schedule does, its name and unused part left out: the position at which each layer goes; prompt layers."""
    ends = ((layer, schedule.drop_position(layer)) for layer in range(schedule.num_layers))
    prompt = schedule.prompt_layers()
    listed = "" if len(prompt) == schedule.num_layers else f"/{','.join(map(str, prompt))}"
    return ",".join(f"{layer}:{end}" for layer, end in ends if end is not None) + listed
