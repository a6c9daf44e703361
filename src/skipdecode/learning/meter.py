"""Teacher-forced losses of schedules on the same records, no gradients; measured losses are kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.common.resume import ResumeLog
from skipdecode.data.batches import IGNORE, Batch
from skipdecode.errors import DivergedError
from skipdecode.models.attach import Attachment
from skipdecode.models.fit import Fit
from skipdecode.models.forward import response_logits
from skipdecode.schedule import Schedule

_SHOWN = 3


def check_finite(values: Tensor, records: Sequence[str]) -> None:
    """Raise DivergedError if a state or a loss of these records is not finite."""
    if not values.isfinite().all():
        shown = ", ".join(records[:_SHOWN]) + (", …" if len(records) > _SHOWN else "")
        raise DivergedError(f"the model's arithmetic overflows on records {shown}: check the model's weights")


class LossMeter:
    """Measures schedules on batches of records.

    Each measurement changes the schedule and the fit of the attachment. A loss that the `store` has, of the same
    schedule with an equal fit, is not measured again. `advance` is called with the number of batches that are done.
    """

    def __init__(
        self,
        attachment: Attachment,
        batches: Sequence[Batch],
        store: ResumeLog,
        advance: Callable[[int], object],
    ) -> None:
        self._attachment, self._batches, self._store, self._advance = attachment, batches, store, advance

    def loss(self, schedule: Schedule, fit: Fit | None = None) -> float:
        """Cross-entropy per response token under a schedule; raises DivergedError if a loss is not finite."""
        key = json.dumps([schedule.to_dict(), fit and fit.digest()])
        loss = self._store.get(key)
        if loss is None:
            self._attachment.schedule, self._attachment.fit = schedule, fit
            tokens = sum(batch.response_tokens for batch in self._batches)
            loss = sum(map(self._measured, self._batches)) / tokens
            self._store.put(key, loss)
        else:
            self._advance(len(self._batches))
        return float(loss)

    @torch.inference_mode()
    def _measured(self, batch: Batch) -> float:
        """Summed losses of a batch."""
        model = self._attachment.model
        logits, targets = response_logits(model, batch.to(model.device)), batch.targets.to(model.device)
        # Row by row: probabilities of all tokens of a large vocabulary take several times the memory of the logits.
        rows = zip(logits, targets, strict=True)
        each = [functional.cross_entropy(x.float(), y, ignore_index=IGNORE, reduction="none") for x, y in rows]
        losses = torch.stack(each).double()
        check_finite(losses, batch.ids)
        self._advance(1)
        return float(losses.sum())
