"""The oracle: what a schedule means, written without the package's gates, plans or cache.

One forward without a cache over the finished text, on a model that nothing is attached to; a plain hook on every layer
replaces its output by `where(active, layer(h), h)`.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from skipdecode import Schedule

LAYER_LISTS = ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers")


def layer_list(model: Any) -> Any:
    """The model's decoder layers, found without the package's table."""
    for path in LAYER_LISTS:
        try:
            return attrgetter(path)(model)
        except AttributeError:
            continue
    raise AssertionError(f"no layer list in {type(model).__name__}")


def active_tokens(schedule: Schedule, prompt: int, columns: int) -> Tensor:
    """(layers, columns) of bool: the layers that run on each column, straight from the schedule's sets."""
    active = torch.zeros(schedule.num_layers, columns, dtype=torch.bool)
    for column in range(columns):
        layers = {*schedule.prompt_layers()} if column < prompt else {*schedule.layers(column - prompt)}
        if column == prompt - 1:
            layers |= {*schedule.layers(0)}
        active[list(layers), column] = True
    return active


def oracle_logits(model: Any, ids: Tensor, mask: Tensor, active: Tensor) -> Tensor:
    """Logits (rows, columns, vocabulary), uncached; `active` (layers, columns) or (layers, rows, columns)."""
    if active.dim() == 2:
        active = active[:, None].expand(-1, ids.shape[0], -1)

    def replace(which: Tensor) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            mixed = torch.where(which[..., None], after, before)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        return hook

    layers = layer_list(model)
    handles = [layer.register_forward_hook(replace(active[i]), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **position_ids(model, mask)).logits
    finally:
        for handle in handles:
            handle.remove()


def position_ids(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """The position ids that `generate` gives left-padded rows, for models that take them."""
    takes = "position_ids" in inspect.signature(type(model).forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes else {}
