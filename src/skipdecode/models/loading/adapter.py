"""A PEFT adapter on its base model, and in its weights."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from skipdecode.errors import UsageError
from skipdecode.models.families import unwrap

__all__ = ["merge_adapter"]


def merge_adapter(model: Any) -> Any:
    """The transformers model with the adapter of a PeftModel added to its weights; a plain model as it is.

    A head that shares its tensor with the token embedding gets a tensor of its own if the adapter changes one of the
    two: the adapter's update is for one module, and a merge would put it into both. If both are still equal after the
    merge, the head shares the tensor again; else the config says that it does not.

    Raises
    ------
    UsageError
        The adapter cannot be merged. Part of it may be merged by then.
    """
    base = unwrap(model)
    if base is model:
        return model
    if (merge := getattr(model, "merge_and_unload", None)) is None:
        raise UsageError("its adapter cannot be merged into the weights")
    split = _split_head(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of shared tensors
            base = merge()
    except (ValueError, TypeError, NotImplementedError) as e:
        raise UsageError(f"its adapter cannot be merged into the weights ({e})") from None
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if split and head.weight.shape == table.weight.shape and head.weight.equal(table.weight):
        head.weight = table.weight
    if split:
        base.config.tie_word_embeddings = head.weight is table.weight
    return base


def _split_head(base: Any) -> bool:
    """Give the head a tensor of its own if it shares it with the embedding and PEFT wraps one of the two."""
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not any(type(module).__module__.startswith("peft.") for module in (table, head)):
        return False
    shared = {id(parameter) for parameter in table.parameters()}
    found = False
    for module in head.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
                found = True
    return found
