"""What a run is set up with: the weights that are tuned, their optimizer, devices and arithmetic."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env
from torch import nn

from skipdecode.common.environment import multiplies_bf16
from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.learning.settings import TuneConfig
from skipdecode.models.fit import fit_state
from skipdecode.schedule import Schedule


def with_lora(model: Any, config: TuneConfig) -> Any:
    """The model with a LoRA adapter in a PEFT wrapper, its own or a fresh one; only the adapter is trainable.

    Raises MissingExtraError: PEFT is not installed; UsageError: the model's own adapter is not a LoRA alone, or
    `lora_targets` names modules that the model does not have.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtraError("tuning a LoRA adapter (not needed with `full`)", "tune") from None
    if hasattr(model, "get_base_model"):
        return _own_lora(model, peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    targets = config.lora_targets[0] if config.lora_targets == ("all-linear",) else list(config.lora_targets)
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2 * config.rank if config.lora_alpha is None else config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # `merge_adapter` unties them
            return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise UsageError(f"lora_targets {' '.join(config.lora_targets)}: {error}") from None


def _own_lora(model: Any, adapter: Collection[str]) -> Any:
    """A PeftModel whose adapter, tensors of these names, is made trainable, in fp32 as a fresh one."""
    if foreign := sorted(name for name in adapter if "lora_" not in name):
        raise UsageError(
            f"the adapter holds more than LoRA matrices, such as {foreign[0]}, and cannot be tuned further: add "
            "`merge`, which merges it and tunes a fresh one"
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def make_optimizer(model: nn.Module, config: TuneConfig) -> torch.optim.AdamW:
    """AdamW over the trainable weights, with weight decay on matrices only.

    The `share` of a parameter group multiplies the learning rate of a step.
    """
    weights, fitted = fit_state({name: p for name, p in model.named_parameters() if p.requires_grad})
    trainable = [*weights.values(), *fitted.values()]
    groups = [
        {"params": [p for p in part.values() if (p.dim() >= 2) == decays], "weight_decay": decay, "share": share}
        for part, share in ((weights, 1.0), (fitted, config.fit_learning_rate / config.learning_rate))
        for decays, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    # One pass over the weights where there is a kernel for it: a quarter of the unfused update's time on a CPU.
    fused = all(p.device.type in ("cpu", "cuda") for p in trainable)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.learning_rate, fused=fused)


def process_state() -> Any:
    """This process among those that the launcher started."""
    # Asked for first, the state would else not see that the launcher wants several processes on the CPU.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def _precision(asked: str, device: torch.device) -> str:
    """accelerate's name of the arithmetic: "bf16" or "no" (fp32); `auto` takes bf16 where the device multiplies it."""
    bf16 = multiplies_bf16(device.type) if asked == "auto" else asked == "bf16"
    return "bf16" if bf16 else "no"


def make_accelerator(config: TuneConfig, schedule: Schedule, *, fitted: bool = False) -> Any:
    """accelerate's Accelerator for a run; the launcher's devices, the precision and accumulation of `config`.

    `fitted`: a fit is trained.
    """
    # Layers that not even the prompt runs, and maps of a fit that no token needs, get no gradient, which several
    # devices must be told.
    some = fitted or len(schedule.last_prompt_layers()) < schedule.num_layers
    unused = DistributedDataParallelKwargs(find_unused_parameters=some)
    # It is one for the process and keeps the first run's precision; a later run may want another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=_precision(config.precision, process_state().device),
        # As a plugin, because the launcher's environment goes before the plain number.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=config.accumulation),
        kwargs_handlers=[unused],
    )
    if (deepspeed := accelerator.state.deepspeed_plugin) is not None:
        # It wants the batch size, which it would else read from a data loader, and clips and accumulates on its own.
        deepspeed.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": config.batch_size,
            "gradient_accumulation_steps": config.accumulation,
            "gradient_clipping": config.clip,
        }
    return accelerator
