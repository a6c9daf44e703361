"""Which weights are tuned, and by what optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.tuning.config import TuneConfig

__all__ = ["add_lora", "make_optimizer"]


def add_lora(model: Any, config: TuneConfig) -> Any:
    """The model with a fresh LoRA adapter in a PEFT wrapper; only the adapter's weights are trainable.

    Raises
    ------
    MissingExtraError
        PEFT is not installed.
    UsageError
        `lora_targets` names modules that the model does not have.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtraError("tuning a LoRA adapter (not needed with --full)", "tune") from None
    targets = config.lora_targets[0] if config.lora_targets == ("all-linear",) else list(config.lora_targets)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.lora_alpha is None else config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise UsageError(f"--lora-targets {' '.join(config.lora_targets)}: {error}") from None


def make_optimizer(model: nn.Module, config: TuneConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights, with weight decay on matrices only."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    # One pass over the weights where there is a kernel for it: a quarter of the unfused update's time on a CPU.
    fused = all(p.device.type in ("cpu", "cuda") for p in trainable)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=fused)
