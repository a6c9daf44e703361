"""The oracle: what a schedule means, written without the package's gates, plans or cache.

One forward without a cache over the finished text, on a model that nothing is attached to; a plain hook on every layer
replaces its output by `where(active, layer(h), h)`.
"""

from __future__ import annotations

import inspect
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from skipdecode import Schedule

LAYER_LISTS = (
    "model.layers",
    "model.decoder.layers",
    "transformer.h",
    "transformer.blocks",
    "biogpt.layers",
    "gpt_neox.layers",
    "gpt_neox_japanese.layers",
    "backbone.layers",
)


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


def oracle_logits(
    model: Any, ids: Tensor, mask: Tensor, active: Tensor, fit: Any = None, schedule: Any = None, prompt: Any = None
) -> Tensor:
    """Logits (rows, columns, vocabulary), uncached; `active` (layers, columns) or (layers, rows, columns).

    With a `fit`, tokens from the last prompt token on (`prompt` columns, one number or one a row; under "max_exit" all
    tokens) that skip a layer take its bridge. Prompt tokens before it take their keys and values in layers that only
    position 0 runs from the maps.
    """
    if active.dim() == 2:
        active = active[:, None].expand(-1, ids.shape[0], -1)
    rest = torch.zeros_like(active[0])
    if fit is not None:
        rest = torch.arange(ids.shape[1])[None] < torch.as_tensor(prompt).reshape(-1, 1) - 1
        rest = rest.expand(ids.shape[0], -1) & (schedule.prompt != "max_exit")

    def replace(index: int, which: Tensor) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            if fit is not None and str(index) in fit.bridges:
                made = fit.bridges[str(index)]
                bridged = before + unit(before) @ made.down.T @ made.up.T + made.bias
                before = torch.where(rest[..., None], before, bridged)
            mixed = torch.where(which[..., None], after, before)
            return (mixed, *output[1:]) if isinstance(output, tuple) else mixed

        return hook

    layers = layer_list(model)
    handles = [layer.register_forward_hook(replace(i, active[i]), with_kwargs=True) for i, layer in enumerate(layers)]
    if fit is not None:
        handles += map_hooks(layers, fit, schedule, rest, mask)
    try:
        return model(input_ids=ids, attention_mask=mask, use_cache=False, **position_ids(model, mask)).logits
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def alone_logits(
    model: Any, schedule: Schedule, text: Tensor, mask: Tensor, prompt: int, row: int, fit: Any = None
) -> Tensor:
    """Logits (new tokens, vocabulary) of one row of `text`, uncached, alone and without its padding.

    `mask` is that of the left-padded prompts, of `prompt` columns.
    """
    padding = int((mask[row] == 0).sum())
    own, start = text[row : row + 1, padding:], prompt - padding
    active = active_tokens(schedule, start, own.shape[1])
    return oracle_logits(model, own, torch.ones_like(own), active, fit, schedule, start)[0, start - 1 : -1]


def position_ids(model: Any, mask: Tensor) -> dict[str, Tensor]:
    """The position ids that `generate` gives left-padded rows, for models that take them."""
    takes = "position_ids" in inspect.signature(type(model).forward).parameters
    return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if takes else {}


def unit(states: Tensor) -> Tensor:
    """States divided by their root mean square."""
    return states / (states.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def map_hooks(layers: Any, fit: Any, schedule: Schedule, rest: Tensor, mask: Tensor) -> list[Any]:
    """Hooks that put a fit's keys and values in the place of a layer's own, where `rest` (rows, columns) holds."""
    number = (
        list(fit.prompt_sets).index(schedule.prompt_layers()) if schedule.prompt_layers() in fit.prompt_sets else None
    )
    starts = (mask.cumsum(1) == 1) & mask.bool()
    handles: list[Any] = []
    for index in set(schedule.layers(0)) - set(schedule.prompt_layers()):
        if number is None or str(index) not in fit.maps[number]:
            continue
        made, seen = fit.maps[number][str(index)], {}

        def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Any = seen) -> None:
            seen["x"] = unit(args[0] if args else kwargs["hidden_states"]) * mask[..., None]

        def give(module: Any, args: Any, output: Tensor, half: int = 0, made: Any = made, seen: Any = seen) -> Tensor:
            x = seen["x"]
            width, size = made.bias.shape[0] // 2, x.shape[2]
            part = slice(half * width, (half + 1) * width)
            out = made.bias[part] + x @ made.weight[part, :size].T
            for tap in range(1, fit.context_tokens + 1):
                earlier = torch.cat([x.new_zeros(x.shape[0], tap, size), x[:, :-tap]], 1)
                out = out + earlier @ made.weight[part, tap * size : (tap + 1) * size].T
            out = torch.where(starts[..., None], made.first[part], out)
            return torch.where(rest[..., None], out, output)

        handles.append(layers[index].register_forward_pre_hook(note, with_kwargs=True))
        for half, name in enumerate(("k_proj", "v_proj")):
            module = next(m for path, m in layers[index].named_modules() if path.endswith(name))
            handles.append(module.register_forward_hook(partial(give, half=half)))
    return handles
