"""Rotary positions that depend on the length of the text: each row of a batch decides by its own length.

With the rope types "longrope" and "dynamic" transformers takes the frequencies of the longest row for the whole batch,
and dynamic ones also of an earlier, longer text. While a `RowRotary` is in place, a row gets the frequencies that it
gets alone.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.families import find_family
from skipdecode.models.release import before


class RowRotary:
    """Replaces the forward of a model's rotary embedding until `restore`; without effect on other rope types."""

    def __init__(self, model: Any) -> None:
        self._limit = switch_length(model)
        self._module = _rotary(model)
        self._kinds = _kinds(self._module)
        self.active = any("dynamic" in kind or kind == "longrope" for kind in self._kinds.values())
        if self.active:
            self._forward = self._module.forward
            self._module.__dict__["forward"] = self

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, ...]:
        """Cosines and sines, each (rows, columns, head_dim), of positions (rows, columns)."""
        named = {} if layer_type is None else {"layer_type": layer_type}
        parts = []
        for row in torch.split(position_ids, 1):
            self._start_anew(layer_type, x.device)
            parts.append(self._forward(x, row, **named))
        return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    def restore(self) -> None:
        """Give the rotary embedding its forward back."""
        if self.active and self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]
            for layer_type, kind in self._kinds.items():
                if "dynamic" in kind:
                    self._start_anew(layer_type, next(self._module.buffers()).device)

    def place(self, call: dict[str, Any], columns: int) -> None:
        """Have the arguments of a forward name each token's position in its own text, and 0 for padding."""
        mask = call.get("attention_mask")
        if not self.active or not isinstance(mask, Tensor) or mask.dim() != 2:
            return
        text = mask.bool().long()
        given = call.get("position_ids")
        positions = (text.cumsum(1) - 1)[:, -columns:] if given is None else given
        call["position_ids"] = (positions * text[:, -columns:]).clamp(min=0)

    def check_growth(self, call: dict[str, Any], past: int, columns: int) -> None:
        """Refuse a forward after `past` cached columns in which a text grows beyond the keys that the cache holds.

        Raises UnsupportedFeatureError: the keys of the earlier tokens were made for a text of at most `switch_length`
        tokens.
        """
        if self._limit is None:
            return
        given, mask = call.get("position_ids"), call.get("attention_mask")
        if not past:
            # It gives the last token alone to the forward that makes all keys anew.
            if before("5.20") and given is not None and bool((given[:, 0] > 0).any()):
                raise UnsupportedFeatureError(
                    f"generate of transformers before 5.20 forgets a text that grows beyond {self._limit} tokens "
                    "(original_max_position_embeddings): install transformers 5.20, or give use_cache=False; "
                    "skipdecode.LLM takes such texts"
                )
            return
        after = torch.tensor([past + columns]) if given is None else given.amax(1) + 1
        earlier = after - (columns if mask is None else mask[:, -columns:].bool().sum(1))
        if bool(((earlier > 0) & (earlier <= self._limit) & (after > self._limit)).any()):
            raise UnsupportedFeatureError(
                f"a text grows beyond {self._limit} tokens (original_max_position_embeddings) on a cache whose keys "
                "were made for a shorter one: give use_cache=False, or rows of one length to generate; skipdecode.LLM "
                "takes any rows"
            )

    def _start_anew(self, layer_type: str | None, device: torch.device) -> None:
        """Forget the longest text that dynamic frequencies have seen."""
        if "dynamic" not in self._kinds[layer_type]:
            return
        module, prefix = self._module, "" if layer_type is None else f"{layer_type}_"
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
        frequencies = getattr(module, f"{prefix}original_inv_freq").to(device)
        module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)


def switch_length(model: Any) -> int | None:
    """The number of tokens beyond which `generate` of this model makes all keys anew, with long factors; None: never.

    Other classes with "longrope" keep the keys that were made with short factors.
    """
    if not find_family(model).renews_keys or "longrope" not in _kinds(_rotary(model)).values():
        return None
    return int(model.config.original_max_position_embeddings)


def _rotary(model: Any) -> Any:
    path = find_family(model).layers.rpartition(".")[0]
    return getattr(attrgetter(path)(model), "rotary_emb", None)


def _kinds(rotary: Any) -> dict[str | None, str]:
    """The rope types of a rotary embedding by layer type; the key is None if all layers rotate alike."""
    found = getattr(rotary, "rope_type", "default")
    return dict(found) if isinstance(found, dict) else {None: found}
