"""The fast path of a transformers model on its device."""

from __future__ import annotations

from typing import Any, get_args

from skipdecode.engine.dense_model import DenseModel
from skipdecode.engine.fast_model import FastModel, NativeModel
from skipdecode.engine.kernels import KernelChoice, native_kernels
from skipdecode.engine.kernels.quantize import QUANTIZATIONS, Quantization
from skipdecode.engine.model_spec import read_model
from skipdecode.errors import UsageError

__all__ = ["open_model"]


def open_model(model: Any, kernel: KernelChoice = "auto", quantization: Quantization | None = None) -> FastModel:
    """The fast path.

    Parameters
    ----------
    model : PreTrainedModel
        See `FastModel`.
    kernel : {"auto", "native", "dense"}
        native: the C++ kernels. dense: torch operators, in steps that are captured as graphs on CUDA devices. auto: the
        C++ kernels where they can serve, else dense; its `hint` then says why, except on CUDA devices.
    quantization : {"int8", "int4"}, optional
        See `NativeModel`; only the C++ kernels read such weights.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.
    UsageError
        If the choice is not known or cannot be had here.
    """
    if kernel not in get_args(KernelChoice):
        raise UsageError(f"kernel {kernel!r} is not known: accepted are {', '.join(get_args(KernelChoice))}")
    if quantization not in (None, *QUANTIZATIONS):
        raise UsageError(f"quantization {quantization!r} is not known: accepted are {', '.join(QUANTIZATIONS)}")
    read_model(model, positions=1)  # refuses what does not fit before kernels are built
    weight = model.get_input_embeddings().weight
    if kernel == "dense" or (kernel == "auto" and weight.device.type == "cuda"):
        if quantization is not None:
            raise UsageError(f"{quantization} weights are read on CPUs only, the model is on {weight.device.type}")
        return DenseModel(model)
    kernels, reason = native_kernels(weight.device, weight.dtype)
    if kernels is not None:
        return NativeModel(model, kernels, quantization)
    if quantization is not None:
        raise UsageError(f"{quantization} weights need the fast engine's kernels: {reason}")
    if kernel == "native":
        raise UsageError(reason)
    return DenseModel(model, hint=reason)
