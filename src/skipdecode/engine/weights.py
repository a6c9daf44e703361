"""The weights of the C++ kernels: the model's own, moved into one block of memory, or copies of 8 or 4 bits.

Separate tensors of a few megabytes contain few huge pages. One block, in the order of a step's reads, consists almost
entirely of huge pages. The model's parameters become views of the block. Their old memory is freed tensor by tensor.

The token embedding is not quantised, even if it is tied to the output embedding, because only single rows of it are
read. The output embedding has 8 bits even if the layers have 4, as in llama.cpp's files: 4 bits in the output embedding
would cost more quality than in all layers together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from skipdecode.common.environment import read_in_turn
from skipdecode.engine.kernels.memory import Arena
from skipdecode.engine.kernels.quantize import Quantization, QuantizedWeight, quantize, room_of
from skipdecode.engine.model_spec import Join, matrices


def move_into_one_block(model: Any) -> None:
    """Move the projections and the output embedding of a model into one block; a second call does nothing.

    Parameters that are read as one matrix become neighbours.
    """
    parameters = defaultdict(list)
    for parameter in model.parameters():
        # Transposed parameters stay, because transformers saves them only from separate memory.
        if parameter.is_contiguous():
            parameters[parameter.data_ptr()].append(parameter)
    moved = {parts[0].data_ptr(): parts for parts in matrices(model) if all(p.data_ptr() in parameters for p in parts)}
    if len({part.untyped_storage().data_ptr() for parts in moved.values() for part in parts}) == 1:
        return
    first = next(model.parameters())
    arena = Arena((sum(part.nbytes for part in parts) for parts in moved.values()), first.device)

    def places_of() -> Iterator[tuple[Tensor, Tensor]]:
        for parts in moved.values():
            room = arena.take(sum(part.nbytes for part in parts)).view(first.dtype).view(-1, parts[0].shape[1])
            for part in parts:
                place, room = room[: len(part)], room[len(part) :]
                yield place, part.detach()

    for place, weight in read_in_turn(places_of()):
        place.copy_(weight)
        for parameter in parameters[weight.data_ptr()]:
            parameter.data = place


class QuantizedWeights:
    """Quantised copies of one model's projections and output embedding; the model keeps its own."""

    def __init__(self, model: Any, kind: Quantization) -> None:
        read = matrices(model)
        shapes = {parts[0].data_ptr(): (sum(map(len, parts)), parts[0].shape[1]) for parts in read}
        rooms = (size for shape in shapes.values() for size in room_of(shape, kind))
        arena, made = Arena(rooms, next(model.parameters()).device), dict[int, QuantizedWeight]()
        for parts, part in read_in_turn((group, one) for group in read for one in group):
            if part is parts[-1] and (place := parts[0].data_ptr()) not in made:
                made[place] = quantize(torch.cat(parts) if len(parts) > 1 else part, kind, arena.take)
        self._made = [made[parts[0].data_ptr()] for parts in read]

    def join(self) -> Join:
        """Gives the copies to `read_model`, in the order in which it asks for them."""
        made = iter(self._made)
        return lambda parts: next(made)
