"""`generate` of an attached model: what it refuses by name, and what it tells the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.cache import SkipCache

__all__ = ["GenerationOptions", "GenerationStats"]

_ROLLBACK = "it rolls the cache back, and skipped layers have nothing to roll back to"
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


class GenerationOptions:
    """The options of one `generate` call, wherever they were given.

    Parameters
    ----------
    given : dict
        Keyword arguments of the call.
    config, defaults : GenerationConfig
        The call's config object, if any, and the model's own; transformers takes from the latter what the former leaves
        open.
    """

    def __init__(self, given: dict[str, Any], config: Any, defaults: Any) -> None:
        self._given = given
        self._sources = [config, defaults]

    def value(self, name: str) -> Any:
        """An option's value; None where nobody set it."""
        values = [self._given.get(name), *(getattr(source, name, None) for source in self._sources)]
        return next((v for v in values if v is not None), None)

    def uses_cache(self) -> bool:
        """Whether keys and values are cached. Text that begins as embeddings always is: it cannot be fed again."""
        return self.value("use_cache") is not False or self._given.get("inputs_embeds") is not None

    def prompt_columns(self, inputs: Any) -> int | None:
        """Columns of the prompt; None if the text starts from the model's own begin token."""
        for candidate in (self._given.get("inputs_embeds"), inputs, self._given.get("input_ids")):
            if isinstance(candidate, Tensor):
                return int(candidate.shape[1])
        return None

    def check(self) -> None:
        """Raise UnsupportedFeatureError, naming the option and the reason, if one breaks cached skipping."""
        if (reason := self.refusal()) is not None:
            raise UnsupportedFeatureError(reason)

    def refusal(self) -> str | None:
        """Why the call cannot run under a schedule, if so."""
        advice = "leave it out, or detach first"
        for name, reason in _REFUSED_IF_SET.items():
            value = self.value(name)
            if value is not None and value is not False:
                return f"{name}: {reason}; {advice}"
        if self.value("guidance_scale") not in (None, 1, 1.0):
            return f"guidance_scale: {_REFUSED_IF_SET['negative_prompt_ids']}; {advice}"
        kind = self.value("cache_implementation")
        if kind is not None and self._given.get("cache_implementation") != "dynamic":
            return (
                f"cache_implementation={kind!r} is not supported: only a dynamic cache, which is what an attached "
                f"model uses, can leave skipped layers empty; {advice}"
            )
        past = self._given.get("past_key_values")
        return None if past is None or isinstance(past, SkipCache) else _foreign(past)

    @staticmethod
    def refuse_cache(past: Any) -> None:
        """Raise UnsupportedFeatureError for a cache that is not ours."""
        raise UnsupportedFeatureError(_foreign(past))


def _foreign(past: Any) -> str:
    return (
        f"past_key_values of type {type(past).__name__} is not supported: pass a cache that an attached model "
        "returned, or attachment.new_cache()"
    )
