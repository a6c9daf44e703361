"""The C++ kernels for CPUs, built on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from skipdecode.engine.kernels.native import NativeKernels

__all__ = ["native_kernels"]


def native_kernels(device: torch.device, dtype: torch.dtype) -> tuple[NativeKernels | None, str]:
    """The C++ kernels for a dtype and a device, or None and the reason why they cannot be used."""
    from skipdecode.engine.kernels.build import KernelBuildError
    from skipdecode.engine.kernels.native import WEIGHT_DTYPES, NativeKernels

    if device.type != "cpu":
        return None, f"the fast engine runs on CPUs, and the model is on {device.type}"
    if dtype not in WEIGHT_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return None, f"the fast engine reads bfloat16 and float32 weights, and the model has {name}"
    try:
        return NativeKernels(dtype), ""
    except KernelBuildError as error:
        return None, str(error)
