"""The gate: stands in front of a decoder layer, in the model's own layer list, and obeys the plan of the forward.

A layer object becomes gated by taking a subclass of its own class that overrides `__call__`, and becomes plain again by
taking its class back. The layer stays the same object with the same parameters, so state dicts, PEFT, hooks and device
placement see nothing new, and gradient checkpointing recomputes the layer, not the gate.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.plan import LayerPlan, StepPlan

__all__ = ["Conductor", "gate_layer", "is_gated", "ungate_layer", "with_mixin"]


class Conductor:
    """Holds the plan of the forward under way (None: every layer runs on everything); all gates of a model share it."""

    def __init__(self, returns_tuple: bool) -> None:
        self.returns_tuple = returns_tuple
        self.plan: StepPlan | None = None


class _Gated:
    """Mixed into a decoder layer's class; the layer's number and conductor are attributes of the object."""

    _skipdecode: tuple[int, Conductor]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        index, conductor = self._skipdecode
        run = super().__call__  # type: ignore[misc]
        if conductor.plan is None:
            return run(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        plan = conductor.plan.layers[index]
        if plan.count == 0:
            return (hidden,) if conductor.returns_tuple else hidden
        columns = hidden.shape[1]
        if plan.count < columns:
            args, kwargs = _leading(type(self), plan.count, columns, args, kwargs)
        out = run(*args, **kwargs)
        if plan.count == columns and plan.keep is None:
            return out
        if not conductor.returns_tuple:
            return _merge(out, hidden, plan)
        return (_merge(out[0], hidden, plan), *out[1:])


def ungate_layer(layer: nn.Module) -> None:
    """Make a gated layer plain again."""
    base = type(layer).__dict__.get("_skipdecode_base")
    if base is not None:
        layer.__class__ = base
    del layer.__dict__["_skipdecode"]


def gate_layer(layer: nn.Module, index: int, conductor: Conductor) -> None:
    """Gate a decoder layer, number `index` of its model."""
    layer.__dict__["_skipdecode"] = (index, conductor)
    base: Any = type(layer)
    layer.__class__ = with_mixin(_Gated, base)


def is_gated(layer: nn.Module) -> bool:
    """Whether a layer is gated."""
    return "_skipdecode" in layer.__dict__


@functools.cache
def with_mixin(mixin: Any, base: Any) -> Any:
    """A subclass of `base`, under its name, with the methods of `mixin` in front of its own."""
    # The name stays, because FSDP and device maps find decoder layers by it.
    body = {"_skipdecode_base": base, "__module__": base.__module__, "__doc__": base.__doc__}
    mixed: Any = type(base.__name__, (mixin, base), body)
    # transformers wraps `forward` of every subclass for checkpointing. Two wrappers would checkpoint twice when the
    # backward pass comes after detach.
    if "forward" in mixed.__dict__:
        del mixed.forward
    return mixed


def _merge(out: Tensor, hidden: Tensor, plan: LayerPlan) -> Tensor:
    """The layer's output on its tokens, what came in everywhere else."""
    if plan.keep is not None:
        out = torch.where(plan.keep.to(out.device).unsqueeze(-1), out, hidden[:, : plan.count])
    return torch.cat([out, hidden[:, plan.count :]], dim=1) if plan.count < hidden.shape[1] else out


# ---------------------------------------------------------------------- leading columns of a layer's inputs


@functools.cache
def _positional_names(layer_class: Any) -> tuple[str, ...]:
    parameters = inspect.signature(layer_class.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)[1:]


def _leading(
    layer_class: type, count: int, columns: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments for the first `count` of `columns` columns."""
    names = _positional_names(layer_class)
    short = tuple(_cut(n, v, count, columns) for n, v in zip(names, args, strict=False))
    return short, {n: _cut(n, v, count, columns) for n, v in kwargs.items()}


def _cut(name: str, value: Any, count: int, columns: int) -> Any:
    if value is None:
        return None
    gone = columns - count
    match name:
        case "hidden_states":
            return value[:, :count]
        case "attention_mask":
            return _cut_mask(value, count, columns)
        case "position_ids":
            return value[..., :count]
        case "position_embeddings":
            return tuple(part[..., :count, :] for part in value)
        case "cache_position":
            return value[:count]
        case "alibi":
            return value[..., : value.shape[-1] - gone]
    return value


def _cut_mask(mask: Any, count: int, columns: int) -> Any:
    if not isinstance(mask, Tensor):
        raise UnsupportedFeatureError(
            f"attention masks of type {type(mask).__name__} cannot be cut to a layer's tokens: load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    mask = mask[..., : mask.shape[-1] - (columns - count)]
    if mask.dim() == 4 and mask.shape[-2] == columns:
        mask = mask[..., :count, :]
    return mask
