"""One optimizer step: forward and backward passes over its batches, clipping, the update; and the loss on dev records.

The loss is a mean over all response tokens of the step, on however many batches and processes they are spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import DistributedType

from skipdecode.data.batches import Batch
from skipdecode.learning.objective import Objective
from skipdecode.models.attach import Attachment
from skipdecode.schedule import Schedule


@dataclass(frozen=True)
class StepReport:
    """Means per response token over all processes, the norm of the gradient before clipping, tokens without padding."""

    loss: float
    cross_entropy: float
    kl: float
    gradient_norm: float
    tokens: int

    @property
    def is_finite(self) -> bool:
        """Whether the update was made; it is not made from a loss or gradient that is no number."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class TrainStep:
    """Makes optimizer steps.

    `accelerator`: its number of accumulation steps is the number of batches of a step. `model` and `optimizer`:
    prepared by the accelerator. `clip`: largest norm of the gradient; 0 does not clip.
    """

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, objective: Objective, clip: float) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._objective = objective
        self._clip = clip or math.inf
        self._updates_in_backward = accelerator.distributed_type == DistributedType.DEEPSPEED

    def __call__(self, batches: Sequence[Batch], learning_rate: float) -> StepReport:
        """Step once on this process's `batches`; no update is made if loss or gradient is not finite."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["share"]
        device = self._accelerator.device
        counts = torch.tensor([[b.response_tokens, b.tokens] for b in batches], device=device).sum(0)
        response, tokens = self._accelerator.reduce(counts, reduction="sum").tolist()
        # accelerate divides by the accumulation steps and averages over processes; this undoes both.
        scale = len(batches) * self._accelerator.num_processes / response
        sums, norm = torch.zeros(3, device=device), None
        for batch in batches:
            with self._accelerator.accumulate(self._model):
                losses = self._objective(self._model, batch)
                sums += torch.stack([losses.total.detach(), losses.cross_entropy, losses.kl])
                if self._updates_in_backward and not self._accelerator.reduce(losses.total.detach()).isfinite():
                    break
                self._accelerator.backward(losses.total * scale)
                if self._accelerator.sync_gradients:
                    norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._clip)
        loss, cross_entropy, kl = (self._accelerator.reduce(sums, reduction="sum") / response).tolist()
        # DeepSpeed clips on its own and reports no norm.
        report = StepReport(loss, cross_entropy, kl, 0.0 if norm is None else float(norm), tokens)
        if report.is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return report


@torch.no_grad()
def dev_loss(
    accelerator: Any,
    model: Any,
    attachment: Attachment,
    schedules: Sequence[Schedule],
    batches: Sequence[Callable[[], Batch]],
) -> dict[str, float]:
    """Cross-entropy per response token of all batches, teacher-forced under each schedule, by its name.

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
