"""Moves a model's projections into one block of memory, in the order in which a step reads them.

Separate tensors of a few megabytes hold few huge pages; one block is nearly all of them. The model's parameters become
views of the block, and what they were is freed tensor by tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from torch import Tensor

from skipdecode.common.allocator import return_freed_memory
from skipdecode.engine.kernels.memory import Arena
from skipdecode.engine.model_spec import read_model, weights_of

__all__ = ["compact"]

_KEPT = 2**25  # bytes that malloc may keep of what was moved


def compact(model: Any) -> None:
    """Move the projections and the output embedding of a model with a fast path; does nothing if it was done before."""
    weights = list({weight.data_ptr(): weight for weight in weights_of(read_model(model, positions=1))}.values())
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        return
    parts = _parts(model, weights)
    arena = Arena([weight.nbytes for weight in weights], weights[0].device)
    weights.reverse()
    freed = 0
    while weights:
        # Popped, so that nothing holds the old memory once its parameters have moved.
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
    """The parameters that lie in each weight, by its address."""
    parts: dict[int, list[Tensor]] = {weight.data_ptr(): [] for weight in weights}
    ends = {weight.data_ptr(): weight.data_ptr() + weight.nbytes for weight in weights}
    starts = sorted(ends)
    for parameter in model.parameters():
        address = parameter.data_ptr()
        start = starts[max(0, bisect_right(starts, address) - 1)]
        if start <= address < ends[start]:
            parts[start].append(parameter)
    return parts
