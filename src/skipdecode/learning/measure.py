"""Measurements of a model that is being tuned: its loss on dev records, and how fast its schedule trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from skipdecode.common.stopwatch import Stopwatch, timed
from skipdecode.data.batches import Batch
from skipdecode.learning.objective import Objective
from skipdecode.models.attach import Attachment
from skipdecode.schedule import Schedule


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
    """Time training steps, without their optimizer part, under a schedule and at full depth in turn.

    Parameters
    ----------
    model : Module
        Prepared by the accelerator, with gradients on; they are dropped.
    attachment : Attachment
        It is on the model; its schedule is restored.
    batches : sequence of Batch
        Two or more; the first warms up and is not counted.
    """
    before, objective = attachment.schedule, Objective()
    watch = Stopwatch[Schedule, float]((schedule, Schedule.full(schedule.num_layers)))

    def step(candidate: Schedule, batch: Batch) -> float:
        attachment.schedule = candidate
        seconds = timed(partial(run, batch))
        model.zero_grad(set_to_none=True)
        return seconds

    def run(batch: Batch) -> None:
        losses = objective(model, batch)
        accelerator.backward(losses.total / max(1, losses.tokens))
        losses.total.item()  # waits for the device

    for candidate in watch.sides:
        step(candidate, batches[0])
    for number, batch in enumerate(batches[1:]):
        watch.lap(partial(step, batch=batch), number)
    attachment.schedule = before
    tokens = sum(batch.tokens for batch in batches[1:])
    ours, full = (tokens / sum(watch.laps(candidate)) for candidate in watch.sides)
    return SpeedReport(schedule.name, ours, full, len(batches) - 1)
