"""A model's weights of 8 or 4 bits: the spec's projections and output embedding quantised, everything else as it is.

The token embedding is looked up, not read whole, and stays as it is also where it is tied to the output embedding. The
output embedding takes 8 bits also where the rest takes 4, as in llama.cpp's files: four bits there cost more than in
all layers together.
"""

from __future__ import annotations

from dataclasses import replace

from skipdecode.engine.kernels.memory import Arena
from skipdecode.engine.kernels.quantize import Quantization, QuantizedWeight, quantize
from skipdecode.engine.kernels.spec import LayerSpec, LinearSpec
from skipdecode.engine.model_spec import ModelSpec, weights_of

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
        if not self._made:
            self._quantize(spec)
        layers = [
            LayerSpec(
                self._linear(layer.qkv),
                layer.attention,
                self._linear(layer.out),
                self._linear(layer.mlp_in),
                self._linear(layer.mlp_out),
            )
            for layer in spec.layers
        ]
        return replace(spec, layers=layers, head=self._linear(spec.head))

    def _quantize(self, spec: ModelSpec) -> None:
        *layers, head = weights_of(spec)
        made = [quantize(weight, self._kind) for weight in layers] + [quantize(head, "int8")]
        arena = Arena([size for one in made for size in (one.codes.nbytes, one.scales.nbytes)], head.device)
        for weight, one in zip((*layers, head), made, strict=True):
            self._made[weight.data_ptr()] = replace(one, codes=arena.put(one.codes), scales=arena.put(one.scales))

    def _linear(self, spec: LinearSpec) -> LinearSpec:
        weight = spec.weight
        return spec if isinstance(weight, QuantizedWeight) else replace(spec, weight=self._made[weight.data_ptr()])
