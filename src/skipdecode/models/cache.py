"""The KV cache of an attached model: skipped layers store nothing, and one length holds for all layers.

Forwards in which transformers computes recurrent states wrongly are refused here by name, or computed right. `Family`
says which types this concerns, and `tests/models/test_states.py` shows each fault on the real models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from skipdecode.common.types import PretrainedConfig, PreTrainedModel
from skipdecode.errors import UnsupportedFeatureError
from skipdecode.models.families import Family, family_of, layer_windows, lenders
from skipdecode.models.plan import cached_positions


class _StoredError(Exception):
    """Ends the call of a layer after it has stored keys and values of projected tokens."""


class SkipCache(DynamicCache):  # type: ignore[misc]
    """A dynamic cache in which layers hold different numbers of tokens.

    Positions and masks come from one authoritative length, that of the text. transformers would take it from one layer
    of each attention type, which may have been skipped. A layer that runs holds every column, so its own length equals
    that of the text. `generate` makes the cache while attached; `Attachment.new_cache` makes one for your own loop.

    `prompt_length`: number of prompt columns, with cached ones. Without it, every forward counts as prompt until one
    token is fed to a filled cache.
    """

    def __init__(self, config: PretrainedConfig, prompt_length: int | None = None) -> None:
        super().__init__()
        text_config = config.get_text_config(decoder=True)
        # A function, for copies of the cache are to share the config.
        self._new_layers: Callable[[], list[CacheLayerMixin]] = lambda: _new_layers(text_config)
        self.layers, borrowers = self._new_layers(), lenders(text_config)
        self.keyless = tuple(  # layers without keys and values
            n for n, layer in enumerate(self.layers) if n in borrowers or not isinstance(layer, CacheLayerMixin)
        )
        self.prompt_length = prompt_length
        self.mask: Tensor | None = None  # of a model with recurrent states: the latest mask of a forward of its prompts
        self._fed_to: dict[int, int] = {}  # by recurrent layer: the columns that its state has seen
        self._freed: dict[int, tuple[float, int]] = {}  # by layer: `_sizes`
        self._projecting = False
        self._projected = 0  # columns of this forward that the current layer has stored in earlier calls
        self.map_context: dict[int, Tensor] = {}  # by layer with a fitted map: the last prompt states, which it reads
        self.length = 0
        self.fed: int | None = None

    def next_positions(self, columns: int) -> list[int]:
        """Generation positions of the next `columns` columns (`skipdecode.models.plan.cached_positions`)."""
        return cached_positions(columns, past=self.length, prompt_length=self.prompt_length, fed=self.fed)

    def run_state(self, layer_idx: int, columns: int) -> bool:
        """Whether a layer has a recurrent state; notes that the layer is about to run on the next `columns` columns.

        Raises UnsupportedFeatureError: as `update`.
        """
        if not isinstance(self.layers[layer_idx], LinearAttentionCacheLayerMixin):
            return False
        held = self._columns(layer_idx)
        self._check(layer_idx, held)
        self._fed_to[layer_idx] = held + columns
        return True

    def advance(self, positions: list[int]) -> None:
        """Record that columns with these generation positions were fed; free layers that skipped some."""
        self.length += len(positions)
        for layer in range(len(self.layers)):
            if 0 < self._columns(layer) < self.length:  # it never runs again
                self._freed[layer] = self._sizes(layer)
                self._fed_to.pop(layer, None)
                self.layers[layer] = self._new_layers()[layer]
        if positions[-1] >= 0:
            self.fed = positions[-1] + 1

    def begin_response(self) -> None:
        """Mark all later columns as coming after the prompt, even if no generated token has been fed yet."""
        self.fed = self.fed or 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, and return all keys and values of the layer.

        Raises UnsupportedFeatureError if the layer lacks earlier columns, because the schedule changed or was detached
        in the middle of a text.
        """
        self._check(layer_idx, self.layers[layer_idx].get_seq_length())
        stored: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._projecting:
            raise _StoredError
        return stored

    def _check(self, layer_idx: int, held: int) -> None:
        if held != self.length + self._projected:
            raise UnsupportedFeatureError(
                f"layer {layer_idx} holds {held} of {self.length} columns of this cache, so it cannot run: the "
                "schedule was changed, paused or detached in the middle of a text; start with a new cache"
            )

    def project(self, layer: Callable[[], object], columns: int) -> None:
        """Call `layer` on `columns` columns until it has stored their keys and values, and end the call there.

        This works because every attention passes its keys and values to the cache before it reads them.
        """
        self._projecting = True
        try:
            layer()
        except _StoredError:
            self.note_columns(columns)
        finally:
            self._projecting = False

    def note_columns(self, columns: int) -> None:
        """Note how many columns of this forward the current layer has stored before it runs others; 0 at its end."""
        self._projected = columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of columns fed so far, for any `layer_idx`."""
        return self.length

    def has_previous_state(self, layer_idx: int | None = None, *args: object, **kwargs: object) -> bool:
        """Whether a recurrent layer has a state; of the model (None), whether columns were fed."""
        return self.length > 0 if layer_idx is None else super().has_previous_state(layer_idx, *args, **kwargs)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Key/value length and offset of a layer of this attention type that has run on every column."""
        window = self._window(layer_idx)
        if window is None:
            return self.length + query_length, 0
        return min(self.length, window - 1) + query_length, max(self.length - window + 1, 0)

    def reset(self) -> None:
        """Remove all columns and positions."""
        self.layers = self._new_layers()
        self._fed_to, self._freed, self.map_context = {}, {}, {}
        self.length = 0
        self.fed = self.prompt_length = self.mask = None

    @property
    def is_croppable(self) -> bool:
        """False, because a rollback would need tokens that skipped layers never stored."""
        return False

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: see `is_croppable`."""
        raise UnsupportedFeatureError(
            "crop (rollback of the cache) is not supported under a schedule: copy the cache before you go on, or start "
            "afresh"
        )

    def tokens_held(self, layer: int) -> int:
        """Number of columns whose keys and values `layer` holds."""
        keys = getattr(self.layers[layer], "keys", None)
        return 0 if keys is None or keys.numel() == 0 else int(keys.shape[-2])

    def kv_bytes(self) -> int:
        """Bytes of keys, values and recurrent states held."""
        return sum(self._key_bytes(layer) + state_bytes(held) for layer, held in enumerate(self.layers))

    def kv_bytes_full(self) -> int:
        """Bytes that full depth would hold for the same text."""
        kinds = [(type(layer), self._window(n)) for n, layer in enumerate(self.layers)]
        known = {n: size for n in range(len(kinds)) if any(size := self._freed.get(n, self._sizes(n)))}
        total = 0.0
        for n, kind in enumerate(kinds):  # a layer that never ran has the sizes of one of its kind
            like = n if n in known else next((m for m in known if kinds[m] == kind), n)
            keys, states = known.get(like, (0.0, 0))
            total += self._full_tokens(n) * keys + states
        return round(total)

    def _sizes(self, layer: int) -> tuple[float, int]:
        """Bytes of a column's keys and values, and of the recurrent states, that a layer holds."""
        return self._key_bytes(layer) / max(1, self.tokens_held(layer)), state_bytes(self.layers[layer])

    def _columns(self, layer: int) -> int:
        """The columns that a layer holds, or that its state has seen."""
        held = self.layers[layer]
        recurrent = isinstance(held, LinearAttentionCacheLayerMixin)
        return self._fed_to.get(layer, 0) if recurrent else int(getattr(held, "get_seq_length", int)())

    def key_numbers(self, layer: int) -> int:
        """Numbers of the keys and values together that `layer` holds of all rows."""
        held = self.layers[layer]
        return int(held.keys.numel() + held.values.numel()) if self.tokens_held(layer) else 0

    def _key_bytes(self, layer: int) -> int:
        numbers = self.key_numbers(layer)
        return numbers * int(self.layers[layer].keys.element_size()) if numbers else 0

    def _full_tokens(self, layer: int) -> int:
        if layer in self.keyless:
            return 0
        window = self._window(layer)
        return self.length if window is None else min(self.length, window - 1)

    def _window(self, layer: int) -> int | None:
        held = self.layers[layer]
        return int(held.sliding_window) if getattr(held, "is_sliding", False) else None


def _new_layers(config: PretrainedConfig) -> list[CacheLayerMixin]:
    """Empty layers of a cache for a model's text config."""
    windows = layer_windows(config)
    if family_of(config.model_type).windows == "cache":
        layers: list[CacheLayerMixin] = DynamicCache(config=config).layers
        return layers
    # A layer of transformers with a window of 1 keeps all tokens and says that it keeps none: it is one that grows.
    windows = [window if window != 1 else None for window in windows]
    return [DynamicLayer() if n is None else DynamicSlidingWindowLayer(sliding_window=n) for n in windows]


def state_bytes(layer: CacheLayerMixin, dtype_bytes: float = 2) -> int:
    """Bytes of the recurrent states of a layer of a cache, where a 16-bit number takes `dtype_bytes`."""
    by_number = [states for states in vars(layer).values() if isinstance(states, dict)]
    sizes = [(s.numel(), s.element_size()) for states in by_number for s in states.values() if isinstance(s, Tensor)]
    return round(sum(count * (size if size > 2 else dtype_bytes) for count, size in sizes))


def bounded_steps(model: PreTrainedModel, family: Family) -> list[RemovableHandle]:
    """Hooks that bound dt in steps of one token as longer forwards do; none for most models.

    Mixers of Mamba 2 bound dt (`time_step_limit`) in forwards of several tokens alone. dt is the softplus of the last
    outputs of `in_proj` and a bias, so bounds of these outputs are bounds of dt.
    """
    limited = [mixer for mixer in model.modules() if hasattr(mixer, "time_step_limit")] if family.recurrent else []
    limited = [mixer for mixer in limited if tuple(mixer.time_step_limit) != (0.0, inf)]
    return [mixer.in_proj.register_forward_hook(partial(_bounded, mixer)) for mixer in limited]


def _bounded(mixer: Any, module: nn.Module, args: object, out: Tensor) -> Tensor | None:
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
