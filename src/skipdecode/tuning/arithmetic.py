"""Devices and arithmetic of a run: what accelerate is told."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import GradientAccumulationPlugin, parse_flag_from_env

from skipdecode.schedule import Schedule
from skipdecode.tuning.config import TuneConfig

__all__ = ["choose_precision", "make_accelerator", "process_state"]


def process_state() -> Any:
    """This process among those that the launcher started."""
    # Asked for first, the state would else not see that the launcher wants several processes on the CPU.
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))


def choose_precision(asked: str, device: torch.device) -> str:
    """accelerate's name of the arithmetic: "bf16" or "no" (fp32).

    `auto` takes bf16 where the device multiplies it in hardware. A CPU without AVX512-BF16 or AMX emulates it at a
    fraction of fp32's speed (measured: 21 against 132 GFLOP/s on two AVX2 cores).
    """
    if asked != "auto":
        return {"fp32": "no", "bf16": "bf16"}[asked]
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no"
    if device.type == "cpu":
        # Public only in newer torch; without it fp32 is the safe answer.
        abilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        return "bf16" if abilities.get("avx512_bf16") or abilities.get("amx_bf16") else "no"
    return "no"


def make_accelerator(config: TuneConfig, schedule: Schedule) -> Any:
    """accelerate's Accelerator for a run; the launcher's devices, the precision and accumulation of `config`."""
    # Layers that not even the prompt runs get no gradient, which several devices must be told.
    unused = DistributedDataParallelKwargs(find_unused_parameters=schedule.prompt == "max_exit")
    # It is one for the process and keeps the first run's precision; a later run may want another.
    AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=choose_precision(config.precision, process_state().device),
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
