"""Recurrent states under transformers: what it computes wrong with them is refused by name, or computed right.

`Family` says which types this concerns, and `tests/models/test_states.py` shows each fault on the real models.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.cache import SkipCache
from skipdecode.models.families import Family


def bounded_steps(model: Any, family: Family) -> list[Any]:
    """Hooks that bound dt in steps of one token as longer forwards do; none for most models.

    Mixers of Mamba 2 bound dt (`time_step_limit`) in forwards of several tokens alone. dt is the softplus of the last
    outputs of `in_proj` and a bias, so bounds of these outputs are bounds of dt.
    """
    limited = [each for each in model.modules() if hasattr(each, "time_step_limit")] if family.recurrent else []
    limited = [each for each in limited if tuple(each.time_step_limit) != (0.0, inf)]
    return [each.in_proj.register_forward_hook(partial(_bounded, each)) for each in limited]


def _bounded(mixer: Any, module: Any, args: Any, out: Tensor) -> Tensor | None:
    if out.shape[1] != 1:
        return None
    heads, bounds = mixer.num_heads, torch.tensor(mixer.time_step_limit, device=out.device)
    low, high = (bounds + torch.log(-torch.expm1(-bounds)))[:, None] - mixer.dt_bias.float()  # of the softplus
    if (scale := getattr(mixer, "mup_vector", None)) is not None:
        low, high = low / scale[..., -heads:], high / scale[..., -heads:]
    return torch.cat((out[..., :-heads], out[..., -heads:].clamp(low.to(out.dtype), high.to(out.dtype))), -1)


def check_states(family: Family, cache: SkipCache, mask: Tensor | None, columns: int) -> None:
    """Raise UnsupportedFeatureError if a cached forward over the next `columns` columns would spoil recurrent states.

    `mask` (rows, all columns) marks text. The cache keeps it, to see whether a later one hides what states have seen.
    """
    if not family.recurrent or mask is None or mask.dim() != 2:
        return
    if columns == 1 and cache.next_positions(1)[0] >= 0:  # a generated token
        return
    padded = columns == 1 and not bool(mask[:, -1].all())
    if columns > 1 and cache.length and not family.continues:  # layers see these columns without a mask
        padded = bool((mask[:, cache.length - 1 :].long().diff(dim=1) > 0).any())  # padding before text
    if padded:
        raise UnsupportedFeatureError(
            "a piece of a prompt with padding: recurrent layers of this model would take it for text; give the prompt "
            "in one piece"
        )
    seen = torch.ones_like(mask[:, : cache.length])
    if cache.mask is not None and len(cache.mask) == len(mask):
        seen[:, : cache.mask.shape[1]] = cache.mask
    if not torch.equal(seen.bool(), mask[:, : cache.length].bool()):
        raise UnsupportedFeatureError(
            "attention_mask hides tokens that recurrent states have seen already: begin a fresh cache with the text "
            "without them"
        )
    cache.mask = mask
