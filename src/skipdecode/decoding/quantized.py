"""A model's weights of 8 or 4 bits: the spec's projections and output embedding quantised, everything else as it is.

The token embedding is looked up, not read whole, and stays as it is also where it is tied to the output embedding. The
output embedding takes 8 bits also where the rest takes 4, as in llama.cpp's files: four bits there cost more than in
all layers together.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from skipdecode.decoding.model_spec import ModelSpec
from skipdecode.kernels.quantize import Quantization, QuantizedWeight, quantize
from skipdecode.kernels.spec import LayerSpec, LinearSpec

__all__ = ["QuantizedWeights"]


class QuantizedWeights:
    """Quantises specs of one model; every weight once.

    Parameters
    ----------
    kind : {"int8", "int4"}
    """

    def __init__(self, kind: Quantization) -> None:
        self._kind = kind
        self._made: dict[int, QuantizedWeight] = {}

    def apply(self, spec: ModelSpec) -> ModelSpec:
        """The spec with quantised weights; the model keeps its own."""
        layers = [
            LayerSpec(
                self._linear(layer.qkv, self._kind),
                layer.attention,
                self._linear(layer.out, self._kind),
                self._linear(layer.mlp_in, self._kind),
                self._linear(layer.mlp_out, self._kind),
            )
            for layer in spec.layers
        ]
        return replace(spec, layers=layers, head=self._linear(spec.head, "int8"))

    def _linear(self, spec: LinearSpec, kind: Quantization) -> LinearSpec:
        weight = spec.weight
        if not isinstance(weight, torch.Tensor):
            return spec
        address = weight.data_ptr()
        if address not in self._made:
            self._made[address] = quantize(weight, kind)
        return replace(spec, weight=self._made[address])
