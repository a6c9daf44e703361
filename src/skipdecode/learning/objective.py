"""What a training step minimises: cross-entropy on the response under the schedule, and self-distillation; the step.

    loss = (1 - w) * CE + w * KL(teacher || student),    both summed over response tokens

The teacher is the model before tuning at full depth, without gradients and without dropout: with LoRA the model with
its adapter off, so there is no second copy; with all weights tuned a frozen copy, which costs the model's memory once
more.

A teacher that does not change is asked once for each record. Its top-k tokens are kept with their log-probabilities in
half precision. The KL is then of the top-k tokens and of all other tokens as one.

With a large vocabulary, the intermediate results of a loss and its gradient take many times the memory of the logits.
The gradient is therefore computed together with the loss for a few tokens at a time, as in fused losses (Liger Kernel,
arXiv 2410.10989), and only the gradient is kept.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DistributedType
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from skipdecode.data.batches import IGNORE, Batch
from skipdecode.learning.distributions import TeacherTopK, TextKey, text_key
from skipdecode.models.attach import Attachment
from skipdecode.models.forward import response_logits
from skipdecode.schedule import Schedule

_TOKENS = 32
"""Tokens per chunk of the loss, whose probabilities are in memory at a time."""
_LEAST_REST = 1e-4
"""Least remaining probability: below, half precision leaves nothing to learn."""
ACTIVATIONS = 2**32
"""Bytes that a forward and its gradients may take on a CPU."""
_BYTES = 4
"""Of a token's activations, for each input and output of a matrix (0.5B model: 3.5 with LoRA, 4 with all weights)."""


class Losses(NamedTuple):
    """Sums over the response tokens of one batch; `total` has a gradient, the parts have none."""

    total: Tensor
    cross_entropy: Tensor
    kl: Tensor


class Teacher:
    """The same model at full depth; see the module's text.

    `attachment`: the student's, which is paused while it teaches. `model`: the student without a wrapper for several
    processes, so that one process can ask alone. `adapter`: the student's PEFT wrapper, whose adapter is off while
    teaching. `copy`: frozen, teaches instead of the student, in the context that `arithmetic` gives. `top_k`: number of
    tokens that are kept for each response token when a record occurs first, with 6 bytes each; 0: all tokens, computed
    each time. `known`: distributions that need not be computed; the others are then of as many tokens.
    """

    def __init__(
        self,
        attachment: Attachment,
        model: nn.Module,
        *,
        adapter: Any = None,
        copy: nn.Module | None = None,
        arithmetic: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        top_k: int = 0,
        known: Mapping[TextKey, TeacherTopK] | None = None,
    ) -> None:
        self._attachment, self._model, self._adapter = attachment, model, adapter
        self._copy, self._arithmetic = copy, arithmetic
        self._distributions = dict(known or {})
        widths = (taught.top_tokens.shape[1] for taught in self._distributions.values())
        self._top_k = next(widths, top_k)

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Logits that predict the response columns, as `response_logits`, without gradients."""
        if self._copy is not None:
            with self._arithmetic():
                return response_logits(self._copy, batch, attached=False)
        adapter_off = contextlib.nullcontext() if self._adapter is None else self._adapter.disable_adapter()
        with self._attachment.paused(), adapter_off, _evaluating(self._model):
            return response_logits(self._model, batch)

    def taught(self, batch: Batch) -> Tensor | TeacherTopK:
        """The logits at the response columns of a batch, or their top-k tokens, flattened."""
        if not self._top_k:
            return self.logits(batch).flatten(0, 1)
        texts = zip(batch.input_ids, batch.attention_mask > 0, batch.targets != IGNORE, strict=True)
        rows = [(ids[mask].tolist(), int(counted.sum())) for ids, mask, counted in texts]
        keys = [text_key(ids[:-length], ids[-length:]) for ids, length in rows]
        if not self._distributions.keys() >= set(keys):
            for key, logits in zip(keys, self.logits(batch), strict=True):
                self._distributions[key] = self._top(logits[: key[0]])
        device, pad = batch.input_ids.device, torch.nn.utils.rnn.pad_sequence
        taught = [self._distributions[key] for key in keys]
        values, tokens = (pad(list(part), batch_first=True) for part in zip(*taught, strict=True))
        return TeacherTopK(values.to(device).flatten(0, 1), tokens.to(device).flatten(0, 1).long())

    def _top(self, logits: Tensor) -> TeacherTopK:
        parts = [functional.log_softmax(part.float(), -1) for part in torch.split(logits, _TOKENS)]
        values, tokens = zip(*(part.topk(min(self._top_k, part.shape[-1])) for part in parts), strict=True)
        return TeacherTopK(torch.cat(values).half().cpu(), torch.cat(tokens).int().cpu())


class Objective:
    """Cross-entropy plus self-distillation of one batch.

    `teacher`: asked only when `weight` is above 0. `weight`: w of the module's text.
    """

    def __init__(self, teacher: Teacher | None = None, weight: float = 0.0) -> None:
        self._teacher = teacher if weight > 0 else None
        self._weight = weight

    def __call__(self, model: nn.Module, batch: Batch) -> Losses:
        """Losses of a batch under the schedule that is attached."""
        student = response_logits(model, batch).flatten(0, 1)
        teacher = None if self._teacher is None else self._teacher.taught(batch)
        return token_losses(student, batch.targets.flatten(), teacher, self._weight)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def token_losses(
    student: Tensor, targets: Tensor, teacher: Tensor | TeacherTopK | None = None, weight: float = 0.0
) -> Losses:
    """Sum over the tokens that count: (1 - weight) * CE + weight * KL(teacher || student), with gradient; CE; KL.

    `student` and `teacher` are logits, (tokens, vocabulary), `targets` (tokens,) with `IGNORE` where a token does not
    count. Without a teacher the first sum is the cross-entropy. Tokens that `TeacherTopK` does not have count as one.
    """
    return Losses(*_TokenLosses.apply(student, targets, teacher, weight))  # type: ignore[no-untyped-call]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, targets: Tensor, teacher: Tensor | TeacherTopK | None, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.zeros_like(student) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(3, device=student.device)
        for rows in torch.split((targets != IGNORE).nonzero()[:, 0], _TOKENS):
            guess = functional.log_softmax(student[rows].float(), dim=-1)
            if isinstance(teacher, Tensor):
                losses, part = _part_of_all_tokens(guess, targets[rows], teacher[rows], weight)
            else:
                taught = None if teacher is None else TeacherTopK(*(each[rows] for each in teacher))
                losses, part = _part_of_top_tokens(guess, targets[rows], taught, weight)
            sums += losses
            if gradient is not None:
                gradient[rows] = part.to(gradient.dtype)
        ctx.gradient = gradient
        total, cross_entropy, kl = (x.clone() for x in sums)
        ctx.mark_non_differentiable(cross_entropy, kl)
        return total, cross_entropy, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError("the gradient of token_losses was given away by an earlier backward pass")
        # It is as large as the logits, so it is scaled in place, and not held any longer.
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(outer[0]), None, None, None


def _part_of_all_tokens(guess: Tensor, targets: Tensor, teacher: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Total, cross-entropy and KL to a teacher's logits, and the gradient by the logits, in the memory of `guess`."""
    cross_entropy = functional.nll_loss(guess, targets, reduction="sum")
    wanted = functional.log_softmax(teacher.float(), dim=-1)
    kl = functional.kl_div(guess, wanted, reduction="sum", log_target=True)
    gradient = guess.exp_().sub_(wanted.exp_(), alpha=weight)
    gradient[torch.arange(len(targets)), targets] -= 1 - weight
    return torch.stack(((1 - weight) * cross_entropy + weight * kl, cross_entropy, kl)), gradient


def _part_of_top_tokens(
    guess: Tensor, targets: Tensor, teacher: TeacherTopK | None, weight: float
) -> tuple[Tensor, Tensor]:
    """The same for a teacher's top-k tokens, or none: the losses depend on few of the log-probabilities `guess`."""
    tokens = targets[:, None]
    cross_entropy, kl = -guess.gather(1, tokens).sum(), guess.new_zeros(())
    outer = guess.new_full(tokens.shape, weight - 1)
    if teacher is not None:
        with torch.enable_grad():
            known = guess.gather(1, teacher.top_tokens).requires_grad_()
            wanted = _with_rest(teacher.log_probabilities.float())
            kl = functional.kl_div(_with_rest(known), wanted, reduction="sum", log_target=True)
        tokens = torch.cat((tokens, teacher.top_tokens), 1)
        outer = torch.cat((outer, weight * torch.autograd.grad(kl, known)[0]), 1)
    # Of log-softmax: what comes from outside, less its sum times the probabilities.
    gradient = guess.exp_().mul_(-outer.sum(1, keepdim=True)).scatter_add_(1, tokens, outer)
    return torch.stack(((1 - weight) * cross_entropy + weight * kl.detach(), cross_entropy, kl.detach())), gradient


def _with_rest(log_probabilities: Tensor) -> Tensor:
    """Log-probabilities of top-k tokens, (positions, k), with that of all other tokens as one more column."""
    rest = (1 - log_probabilities.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_REST)
    return torch.cat((log_probabilities, rest.log()), -1)


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

    On the CPU of one process, where a lack of memory ends the process without a word, the rows of a batch whose
    activations would take more than `ACTIVATIONS` bytes go through the model in parts, which makes the same step.

    Attribute `token_bytes`: about what the activations of a token take, at full depth and in fp32.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        clip: float,
    ) -> None:
        self._accelerator, self._model, self._optimizer = accelerator, model, optimizer
        self._objective = objective
        numbers = sum(sum(weight.shape[-2:]) for weight in model.parameters() if weight.ndim > 1)
        self.token_bytes = _BYTES * max(1, numbers)
        alone = accelerator.distributed_type == DistributedType.NO and accelerator.device.type == "cpu"
        self._most_tokens = ACTIVATIONS // self.token_bytes if alone else sys.maxsize
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
                for part in batch.parts(self._most_tokens):
                    losses = self._objective(self._model, part)
                    sums += torch.stack([losses.total.detach(), losses.cross_entropy, losses.kl])
                    lost = self._updates_in_backward and not self._accelerator.reduce(losses.total.detach()).isfinite()
                    if not lost:
                        self._accelerator.backward(losses.total * scale)
                if self._accelerator.sync_gradients and not lost:
                    norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._clip)
            if lost:
                break
        loss, cross_entropy, kl = (self._accelerator.reduce(sums, reduction="sum") / response).tolist()
        # DeepSpeed clips on its own and reports no norm.
        report = StepReport(loss, cross_entropy, kl, 0.0 if norm is None else float(norm), tokens)
        if report.is_finite:
            self._optimizer.step()
        self._optimizer.zero_grad()
        return report


@torch.no_grad()
def dev_loss(
    accelerator: Accelerator,
    model: nn.Module,
    attachment: Attachment,
    schedules: Sequence[Schedule],
    batches: Sequence[Batch],
) -> dict[str, float]:
    """Cross-entropy per response token of all batches, teacher-forced under each schedule, by its name.

    Batches are shared out to the processes; all of them make the same number of forward passes, as sharded models need.
    Dropout is off, the attachment's schedule and the model's mode are restored.
    """
    before, losses = attachment.schedule, dict[str, float]()
    world, rank = accelerator.num_processes, accelerator.process_index
    objective = Objective()
    with _evaluating(model):
        for schedule in schedules:
            attachment.schedule = schedule
            sums = torch.zeros(2, device=accelerator.device)
            for first in range(0, len(batches), world):
                mine = first + rank
                batch = batches[mine if mine < len(batches) else 0].to(accelerator.device)
                loss = objective(model, batch).cross_entropy
                if mine < len(batches):
                    sums += torch.stack([loss, loss.new_tensor(batch.response_tokens)])
            total, tokens = accelerator.reduce(sums, reduction="sum").tolist()
            losses[schedule.name] = total / tokens
    attachment.schedule = before
    return losses
