"""CPU kernels that decode at memory speed, built on first use, and their torch counterparts; CUDA graphs for GPUs.

`backend_for(device, dtype)` picks: the C++ kernels on CPUs with a compiler, torch elsewhere (with the reason). Decoding
on a GPU takes neither: steps of fixed shape over slabs (dense.py, slabs.py), recorded as graphs (graphs.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from skipdecode.errors import UsageError

if TYPE_CHECKING:
    import torch

    from skipdecode.engine.kernels.spec import Backend

__all__ = ["KernelChoice", "backend_for"]

KernelChoice = Literal["auto", "native", "torch", "dense"]


def backend_for(device: torch.device, dtype: torch.dtype, choice: KernelChoice = "auto") -> tuple[Backend, str]:
    """The kernels for a device and a weight type, and why they are not the C++ ones ("": they are, or were not wanted).

    Raises
    ------
    UsageError
        If `choice` is "native" and the C++ kernels cannot serve here.
    """
    from skipdecode.engine.kernels.build import KernelBuildError
    from skipdecode.engine.kernels.native import WEIGHT_DTYPES, NativeBackend
    from skipdecode.engine.kernels.reference import TorchBackend

    if choice not in ("auto", "native", "torch"):
        raise UsageError(f"kernel {choice!r} is not known: accepted are auto, native, torch")
    if choice == "torch":
        return TorchBackend(dtype), ""
    if device.type != "cpu":
        reason = f"the C++ kernels run on CPUs, the model is on {device.type}"
    elif dtype not in WEIGHT_DTYPES:
        reason = f"the C++ kernels read bfloat16 and float32 weights, the model has {str(dtype).removeprefix('torch.')}"
    else:
        try:
            return NativeBackend(dtype), ""
        except KernelBuildError as error:
            reason = str(error)
    if choice == "native":
        raise UsageError(reason)
    return TorchBackend(dtype), reason
