"""Kernels that decode: C++ at memory speed on CPUs, built on first use; torch operators in CUDA graphs on GPUs.

`native_kernels` gives the C++ ones where they can serve, else says why not. The torch operators work on a static KV
cache (dense.py, static_cache.py) in steps of fixed shape, which GPUs capture as graphs (graphs.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from skipdecode.engine.kernels.native import NativeKernels

__all__ = ["KernelChoice", "native_kernels"]

KernelChoice = Literal["auto", "native", "dense"]


def native_kernels(device: torch.device, dtype: torch.dtype) -> tuple[NativeKernels | None, str]:
    """The C++ kernels for weights of a type on a device, or None and why they cannot serve there."""
    from skipdecode.engine.kernels.build import KernelBuildError
    from skipdecode.engine.kernels.native import WEIGHT_DTYPES, NativeKernels

    if device.type != "cpu":
        return None, f"the C++ kernels run on CPUs, the model is on {device.type}"
    if dtype not in WEIGHT_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return None, f"the C++ kernels read bfloat16 and float32 weights, the model has {name}"
    try:
        return NativeKernels(dtype), ""
    except KernelBuildError as error:
        return None, str(error)
