"""The weights of the C++ kernels: the model's own, moved into one block of memory, or copies of 8 or 4 bits.

Separate tensors of a few megabytes contain few huge pages. One block, in the order of a step's reads, consists almost
entirely of huge pages. The model's parameters become views of the block. Their old memory is freed tensor by tensor.

The token embedding is not quantised, even if it is tied to the output embedding, because only single rows of it are
read. The output embedding has 8 bits even if the layers have 4, as in llama.cpp's files: 4 bits in the output embedding
would cost more quality than in all layers together.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

from torch import Tensor

from skipdecode.common.environment import return_freed_memory
from skipdecode.engine.kernels.memory import Arena
from skipdecode.engine.kernels.quantize import Quantization, QuantizedWeight, quantize
from skipdecode.engine.kernels.spec import LinearSpec, ModelSpec
from skipdecode.engine.model_spec import read_model, weights_of

_KEPT = 2**25  # bytes of moved weights that malloc may keep


def move_into_one_block(model: Any) -> None:
    """Move the projections and the output embedding of a model into one block; a second call does nothing."""
    read = weights_of(read_model(model, positions=1))
    # Transposed parameters stay, because transformers saves them only from separate memory.
    plain = {parameter.data_ptr() for parameter in model.parameters() if parameter.is_contiguous()}
    weights = list({weight.data_ptr(): weight for weight in read if weight.data_ptr() in plain}.values())
    del read  # it would keep the old memory alive
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        return
    parts = _parts(model, weights)
    arena = Arena([weight.nbytes for weight in weights], weights[0].device)
    weights.reverse()
    freed = 0
    while weights:
        # pop, so that nothing keeps the old memory alive once its parameters have moved.
        weight = weights.pop()
        place = arena.put(weight).flatten()
        for parameter in parts[weight.data_ptr()]:
            begin = (parameter.data_ptr() - weight.data_ptr()) // weight.element_size()
            parameter.data = place[begin : begin + parameter.numel()].view(parameter.shape)
        freed += weight.nbytes
        del weight
        if freed > _KEPT:
            return_freed_memory()
            freed = 0


def _parts(model: Any, weights: list[Tensor]) -> dict[int, list[Tensor]]:
    """The parameters within each weight, by the weight's address."""
    parts: dict[int, list[Tensor]] = {weight.data_ptr(): [] for weight in weights}
    ends = {weight.data_ptr(): weight.data_ptr() + weight.nbytes for weight in weights}
    starts = sorted(ends)
    for parameter in model.parameters():
        address = parameter.data_ptr()
        start = starts[max(0, bisect_right(starts, address) - 1)]
        if start <= address < ends[start]:
            parts[start].append(parameter)
    return parts


class QuantizedWeights:
    """Quantised copies of one model's projections and output embedding, each made once."""

    def __init__(self, kind: Quantization) -> None:
        self._kind = kind
        self._made: dict[int, QuantizedWeight] = {}

    def apply(self, spec: ModelSpec) -> ModelSpec:
        """The spec with quantised weights; the model keeps its own."""
        if not self._made:
            self._quantize(spec)
        linear = self._linear
        layers = [
            replace(x, qkv=linear(x.qkv), out=linear(x.out), mlp_in=linear(x.mlp_in), mlp_out=linear(x.mlp_out))
            for x in spec.layers
        ]
        return replace(spec, layers=layers, head=linear(spec.head))

    def _quantize(self, spec: ModelSpec) -> None:
        weights = weights_of(spec)
        made = [quantize(weight, self._kind) for weight in weights]
        arena = Arena([size for one in made for size in (one.codes.nbytes, one.scales.nbytes)], weights[0].device)
        for weight, one in zip(weights, made, strict=True):
            self._made[weight.data_ptr()] = replace(one, codes=arena.put(one.codes), scales=arena.put(one.scales))

    def _linear(self, spec: LinearSpec) -> LinearSpec:
        weight = spec.weight
        return spec if isinstance(weight, QuantizedWeight) else replace(spec, weight=self._made[weight.data_ptr()])
