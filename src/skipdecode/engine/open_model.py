"""The fast path of a transformers model on its device."""

from __future__ import annotations

from typing import Any

from skipdecode.engine.dense_model import DenseModel
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.kernels import KernelChoice
from skipdecode.engine.kernels.quantize import Quantization
from skipdecode.errors import UsageError

__all__ = ["open_model"]


def open_model(model: Any, kernel: KernelChoice = "auto", quantization: Quantization | None = None) -> FastModel:
    """The fast path.

    Parameters
    ----------
    model : PreTrainedModel
        See `FastModel`.
    kernel : {"auto", "native", "torch", "dense"}
        auto: on CUDA devices dense (torch operators, steps recorded as graphs), else the C++ kernels where possible.
    quantization : {"int8", "int4"}, optional
        See `FastModel`; only the C++ kernels read such weights.

    Raises
    ------
    UnfitModelError
        If the fast path does not cover the model.
    UsageError
        If the choice cannot be had here.
    """
    # What is no transformers model is refused by name further on.
    device = getattr(getattr(model, "device", None), "type", "cpu")
    if kernel == "dense" or (kernel == "auto" and device == "cuda"):
        if quantization is not None:
            raise UsageError(f"{quantization} weights are read on CPUs only, the model is on {device}")
        return DenseModel(model)
    return FastModel(model, kernel, quantization)
