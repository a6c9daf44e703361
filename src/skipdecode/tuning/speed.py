"""Training speed under a schedule next to full depth: the same batches in turn, forward and backward, cross-entropy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.models.attach import Attachment
from skipdecode.schedule import Schedule
from skipdecode.tuning.collate import Batch
from skipdecode.tuning.objective import Objective

__all__ = ["SpeedReport", "compare_speed"]


@dataclass(frozen=True)
class SpeedReport:
    """Tokens (prompt and response, no padding) per second of forward and backward."""

    schedule: str
    tokens_per_s: float
    full_depth_tokens_per_s: float
    batches: int

    @property
    def ratio(self) -> float:
        """How many times faster the schedule trains."""
        return self.tokens_per_s / self.full_depth_tokens_per_s


def compare_speed(
    accelerator: Any, model: Any, attachment: Attachment, schedule: Schedule, batches: Sequence[Batch]
) -> SpeedReport:
    """Time training steps without their optimizer part.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        For mixed precision and the backward pass.
    model : Module
        Prepared, with gradients on; its gradients are dropped.
    attachment : Attachment
        Of the model; its schedule is restored.
    schedule : Schedule
        Timed against full depth.
    batches : sequence of Batch
        Two or more; the first warms up and is not counted.
    """
    before = attachment.schedule
    candidates = (schedule, Schedule.full(schedule.num_layers))
    seconds = [0.0, 0.0]
    objective = Objective()
    for number, batch in enumerate(batches):
        for which, candidate in enumerate(candidates):
            attachment.schedule = candidate
            start = time.perf_counter()
            losses = objective(model, batch)
            accelerator.backward(losses.total / max(1, losses.tokens))
            losses.total.item()  # waits for the device
            elapsed = time.perf_counter() - start
            model.zero_grad(set_to_none=True)
            if number:
                seconds[which] += elapsed
    attachment.schedule = before
    tokens = sum(batch.tokens for batch in batches[1:])
    return SpeedReport(schedule.name, tokens / seconds[0], tokens / seconds[1], len(batches) - 1)
