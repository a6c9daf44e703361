"""Losses of tokens from their logits, a few tokens at a time.

With a large vocabulary the probabilities that a loss and its gradient pass through take many times the memory of the
logits. The gradient is therefore made part by part together with the loss, as fused losses do (Liger Kernel, arXiv
2410.10989), and only that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from skipdecode.tuning.collate import IGNORE

__all__ = ["token_losses"]

_TOKENS = 32
"""Whose probabilities are in memory at a time."""


def token_losses(
    student: Tensor, targets: Tensor, teacher: Tensor | None = None, weight: float = 0.0, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the tokens that count: (1 - weight) * CE + weight * T^2 * KL, which has a gradient; CE; T^2 * KL.

    Parameters
    ----------
    student, teacher : Tensor
        Logits, (tokens, vocabulary); without a teacher the first sum is the cross-entropy, whatever the weight.
    targets : Tensor
        (tokens,), `IGNORE` where a token does not count.
    weight : float
        Of KL(teacher || student), 0 to 1.
    temperature : float
        T: of both distributions of the divergence.
    """
    total, cross_entropy, kl = _TokenLosses.apply(student, targets, teacher, weight, temperature)  # type: ignore[no-untyped-call]
    return total, cross_entropy, kl


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, targets: Tensor, teacher: Tensor | None, weight: float, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(3, device=student.device)
        for start in range(0, len(student), _TOKENS):
            part = slice(start, start + _TOKENS)
            with torch.set_grad_enabled(gradient is not None):
                logits = student[part].detach().requires_grad_(gradient is not None)
                taught = None if teacher is None else teacher[part]
                losses = _part(logits, targets[part], taught, weight, temperature)
            if gradient is not None:
                (gradient[part],) = torch.autograd.grad(losses[0], logits)
            sums += torch.stack(losses).detach()
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
        return gradient.mul_(outer[0]), None, None, None, None


def _part(
    student: Tensor, targets: Tensor, teacher: Tensor | None, weight: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`token_losses` at once."""
    counted = targets != IGNORE
    logits = student[counted].float()
    log_probabilities = functional.log_softmax(logits, dim=-1)
    cross_entropy = functional.nll_loss(log_probabilities, targets[counted], reduction="sum")
    if teacher is None:
        return cross_entropy, cross_entropy, torch.zeros_like(cross_entropy)
    wanted = functional.log_softmax(teacher[counted].float() / temperature, dim=-1)
    guess = log_probabilities if temperature == 1 else functional.log_softmax(logits / temperature, dim=-1)
    kl = functional.kl_div(guess, wanted, reduction="sum", log_target=True) * temperature**2
    return (1 - weight) * cross_entropy + weight * kl, cross_entropy, kl
