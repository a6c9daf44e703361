"""The sizes of a decoder that its memory and the cost of a fit depend on: weights, and the KV cache.

Sizes are counted on the model that transformers makes of a config on the meta device, so no weights are needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skipdecode.engine.kv import KVLayout
from skipdecode.models.cache import SkipCache, state_bytes
from skipdecode.models.families import decoder_layers, family_of, layer_windows
from skipdecode.models.release import model_cache_name
from skipdecode.schedule import Schedule

# How configs name the experts of a layer, and those that a token takes.
_EXPERTS = (
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
)


@dataclass(frozen=True)
class ModelGeometry:
    """Sizes of a decoder-only model."""

    num_layers: int
    hidden_size: int
    dtype_bytes: float  # of a weight, and of a cached key or value element
    # Weights of a layer that a token reads; in a mixture of experts, of its own experts. The mean if layers differ.
    layer_params: float
    params: int  # all weights; those that head and embedding share count once
    window: int = 0  # tokens that sliding-window attention sees; 0 without any
    windowed: tuple[int, ...] = ()  # layers with sliding-window attention
    keys: tuple[int, ...] = ()  # for each layer how many numbers a token's keys and values are together
    states: tuple[int, ...] = ()  # for each layer the bytes of a sequence's recurrent states

    @classmethod
    def from_config(cls, config: Any, dtype_bytes: float = 2) -> ModelGeometry:
        """Sizes from a transformers config; of a multimodal one those of its text model.

        Raises UnsupportedModelError for a family whose layers cannot be skipped.
        """
        config = copy.deepcopy(config.get_text_config(decoder=True))  # from_config writes dtype and attention into it
        family_of(config.model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        layers, params = decoder_layers(model), model.num_parameters()
        experts, chosen = (next((n for name in names if (n := getattr(config, name, None))), 1) for names in _EXPERTS)
        active = min(chosen / experts, 1.0)
        sizes = [(name, p.numel()) for layer in layers for name, p in layer.named_parameters(prefix="layer")]
        num_layers, read = len(layers), sum(n * (active if ".experts." in name else 1.0) for name, n in sizes)
        windows = {layer: window for layer, window in enumerate(layer_windows(config)) if window is not None}
        cache = _after_a_token(model)
        keys = [0 if n in cache.keyless else cache.key_numbers(n) for n in range(num_layers)]
        if not any(keys) and len(cache.keyless) < num_layers:  # layers that choose experts before they make keys
            keys = [2 * config.num_key_value_heads * config.kv_channels] * num_layers
        return cls(
            num_layers=num_layers,
            hidden_size=config.hidden_size,
            dtype_bytes=dtype_bytes,
            layer_params=read / num_layers,
            params=params,
            window=max(windows.values(), default=0),
            windowed=tuple(windows),
            keys=tuple(keys),
            states=tuple(state_bytes(layer, dtype_bytes) for layer in cache.layers),
        )

    def weight_bytes(self) -> float:
        """Bytes of all weights that the model holds."""
        return self.params * self.dtype_bytes

    @property
    def window_share(self) -> float:
        """Share of the layers that have sliding-window attention."""
        return len(self.windowed) / self.num_layers

    def kv_bytes_held(self, schedule: Schedule, prompt_len: int, new_tokens: int, batch: int = 1) -> int:
        """KV bytes at the end of a generation under a schedule; a skipped layer holds nothing.

        The last generated token is never fed back, so the cache holds `new_tokens` - 1 generated tokens.
        """
        schedule.check_fits(self.num_layers)
        on_prompt = {*schedule.prompt_layers(), *schedule.projected}
        fed, total = max(new_tokens - 1, 0), 0.0
        for layer, (keys, states) in enumerate(zip(self.keys, self.states, strict=True)):
            drop = schedule.drop_position(layer)
            held = (prompt_len if layer in on_prompt else 0) + fed
            if held and (drop is None or drop >= fed):  # else it was freed
                tokens = min(held, self.window - 1) if layer in self.windowed else held
                total += self.dtype_bytes * keys * tokens + states
        return batch * round(total)

    def mean_layout(self) -> KVLayout:
        """Keys and values of a sequence in a layer, the mean over the layers."""
        keys = sum(self.keys) / self.num_layers * self.dtype_bytes
        return KVLayout(1, round(keys), sum(self.states) // self.num_layers)


@torch.inference_mode()
def _after_a_token(model: Any) -> SkipCache:
    """The cache of a model on the meta device after a token; a layer ends where it chooses experts."""
    cache, returns = SkipCache(model.config), family_of(model.config.model_type).returns

    def begun(forward: Callable[..., Any], hidden: Any, *args: Any, **named: Any) -> Any:
        try:
            return forward(hidden, *args, **named)
        except NotImplementedError:
            return (hidden,) * returns or hidden

    for layer in decoder_layers(model):
        layer.forward = partial(begun, layer.forward)
    named: dict[str, Any] = {model_cache_name(model): cache, "use_cache": True}
    with torch.device("meta"):
        model(torch.zeros(1, 1, dtype=torch.long), **named)
    return cache
