"""One optimizer step: forward and backward passes over its batches, clipping, the update.

The loss is a mean over all response tokens of the step, on however many batches and processes they are spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import DistributedType

from skipdecode.data.batches import Batch
from skipdecode.learning.objective import Objective


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

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        Its number of accumulation steps is the number of batches of a step.
    model, optimizer
        Prepared by the accelerator.
    clip : float
        Largest norm of the gradient; 0 does not clip.
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
