"""`generate` of an attached model: what it refuses by name, and what it tells the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.cache import SkipCache

__all__ = ["GenerationStats", "check_features", "prompt_columns"]

_ROLLBACK = "it rolls the cache back, and skipped layers have nothing to roll back to"
_PLAIN_CACHES = (None, "dynamic", "dynamic_full")
_REFUSED_IF_SET = {
    "assistant_model": f"assisted generation is not supported: {_ROLLBACK}",
    "prompt_lookup_num_tokens": f"prompt lookup is not supported: {_ROLLBACK}",
    "assistant_early_exit": f"self-speculation is not supported: {_ROLLBACK}",
    "use_mtp": f"multi-token prediction is not supported: {_ROLLBACK}",
    "custom_generate": "custom decoding loops are not supported: their use of the cache is unknown",
    "penalty_alpha": "contrastive search is not supported: it copies and rolls back the cache",
    "dola_layers": "DoLa is not supported: it reads layers that may have been skipped",
    "negative_prompt_ids": "classifier-free guidance is not supported: it keeps a second cache of its own",
    "output_hidden_states": "it is not supported: skipped layers have no states to report",
    "output_attentions": "it is not supported: skipped layers have no attentions to report",
}


@dataclass(frozen=True)
class GenerationStats:
    """What the last `generate` call ran and held.

    Parameters
    ----------
    forwards : int
        Forward passes, the prompt's included.
    token_layers, token_layers_full : int
        Sum over columns fed of the layers run, and the same at full depth (one row's worth: rows are in lockstep).
    kv_bytes, kv_bytes_full : int
        Bytes of keys and values held at the end, and what full depth would hold. Zero without a cache.
    """

    forwards: int
    token_layers: int
    token_layers_full: int
    kv_bytes: int
    kv_bytes_full: int

    @property
    def kv_bytes_saved(self) -> int:
        """Bytes that full depth would hold on top."""
        return self.kv_bytes_full - self.kv_bytes


def check_features(options: dict[str, Any], defaults: Any) -> None:
    """Refuse, by name, options of `generate` that break cached skipping.

    `defaults` is the generation config that applies where `options` says nothing.

    Raises
    ------
    UnsupportedFeatureError
        Naming the option, with the reason.
    """

    def value(name: str) -> Any:
        return options.get(name, getattr(defaults, name, None))

    advice = "leave it out, or detach first"
    for name, reason in _REFUSED_IF_SET.items():
        if value(name) not in (None, False):
            raise UnsupportedFeatureError(f"{name}: {reason}; {advice}")
    if value("guidance_scale") not in (None, 1, 1.0):
        raise UnsupportedFeatureError(f"guidance_scale: {_REFUSED_IF_SET['negative_prompt_ids']}; {advice}")
    kind = value("cache_implementation")
    if kind not in _PLAIN_CACHES:
        raise UnsupportedFeatureError(
            f"cache_implementation={kind!r} is not supported: only a dynamic cache can leave skipped layers empty; "
            f"{advice}"
        )
    past = options.get("past_key_values")
    if past is not None and not isinstance(past, SkipCache):
        raise UnsupportedFeatureError(
            f"past_key_values of type {type(past).__name__} is not supported: pass a cache that an attached model "
            "returned, or attachment.new_cache()"
        )


def prompt_columns(inputs: Any, options: dict[str, Any]) -> int | None:
    """Columns of the prompt given to `generate`; None if it starts from the model's own begin token."""
    for candidate in (inputs, options.get("input_ids"), options.get("inputs_embeds")):
        if isinstance(candidate, Tensor):
            return int(candidate.shape[1])
    return None
