"""Loss on dev records, teacher-forced under each schedule that the model is tuned for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from skipdecode.models.attach import Attachment
from skipdecode.schedule import Schedule
from skipdecode.tuning.collate import Batch
from skipdecode.tuning.objective import Objective

__all__ = ["dev_loss"]


@torch.no_grad()
def dev_loss(
    accelerator: Any,
    model: Any,
    attachment: Attachment,
    schedules: Sequence[Schedule],
    batches: Sequence[Callable[[], Batch]],
) -> dict[str, float]:
    """Cross-entropy per response token of all batches, by schedule name.

    Batches are shared out to the processes; all of them make the same number of forward passes, as sharded models need.
    Dropout is off, the attachment's schedule and the model's mode are restored.
    """
    before, training = attachment.schedule, model.training
    world, rank = accelerator.num_processes, accelerator.process_index
    objective = Objective()
    losses: dict[str, float] = {}
    model.eval()
    for schedule in schedules:
        attachment.schedule = schedule
        sums = torch.zeros(2, device=accelerator.device)
        for first in range(0, len(batches), world):
            mine = first + rank
            parts = objective(model, batches[mine if mine < len(batches) else 0]())
            if mine < len(batches):
                sums += torch.stack([parts.cross_entropy, parts.cross_entropy.new_tensor(parts.tokens)])
        loss, tokens = accelerator.reduce(sums, reduction="sum").tolist()
        losses[schedule.name] = loss / tokens
    attachment.schedule = before
    model.train(training)
    return losses
