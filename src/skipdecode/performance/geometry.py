"""The sizes of a decoder that determine its speed: bytes and FLOPs of a layer, of the rest, and of the KV cache.

Sizes are counted on the model that transformers makes of a config on the meta device, so no weights are needed. Only
weights that a decode step reads count: of the input embedding a step reads one row for each token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from skipdecode.engine.kv import KVLayout
from skipdecode.models.families import decoder_layers, family_of
from skipdecode.models.release import model_cache_name
from skipdecode.models.windows import layer_windows
from skipdecode.schedule import Schedule


@dataclass(frozen=True)
class ModelGeometry:
    """Sizes of a decoder-only model.

    Parameters
    ----------
    num_layers, hidden_size, num_heads, num_kv_heads, head_dim : int
        As in the model's config; heads and their size as the KV cache has them.
    dtype_bytes : float
        Bytes of one weight, and of one cached key or value element.
    layer_params : float
        Weights of a layer that every token reads: attention, norms, dense MLP or shared expert and router. The mean if
        layers differ.
    head_params : int
        Weights of the head, the final norm and the projections around it.
    params : int
        All weights; weights that head and embedding share count once.
    expert_params, num_experts, experts_per_token, expert_layers : int
        Weights of one expert, experts of a mixture-of-experts layer, experts of a token, layers that have experts.
    window : int
        Tokens that sliding-window attention sees; 0 without any.
    windowed : tuple of int
        Layers with sliding-window attention.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: float
    layer_params: float
    head_params: int
    params: int
    expert_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_layers: int = 0
    window: int = 0
    windowed: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Any, dtype_bytes: float = 2) -> ModelGeometry:
        """Sizes from a transformers config; of a multimodal one those of its text model.

        Raises UnsupportedModelError for a family whose layers cannot be skipped.
        """
        config = copy.deepcopy(config.get_text_config(decoder=True))  # from_config writes dtype and attention into it
        family_of(config.model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
        layers = decoder_layers(model)
        inside = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        experts = [sum(p.numel() for n, p in x.named_parameters() if ".experts." in f".{n}") for x in layers]
        named = (getattr(config, name, None) for name in ("num_local_experts", "num_experts"))
        count = int(next(filter(None, named))) if any(experts) else 0
        windows = {layer: window for layer, window in enumerate(layer_windows(config)) if window is not None}
        sizes = {"head_params": _head_params(model, layers), "params": model.num_parameters()}
        kv_heads, head_dim = _kv_shape(model, layers)
        return cls(
            num_layers=len(inside),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype_bytes=dtype_bytes,
            layer_params=(sum(inside) - sum(experts)) / len(inside),
            **sizes,
            expert_params=max(experts) // count if count else 0,
            num_experts=count,
            experts_per_token=config.num_experts_per_tok if count else 0,
            expert_layers=sum(map(bool, experts)),
            window=max(windows.values(), default=0),
            windowed=tuple(windows),
        )

    # ------------------------------------------------------------------ one step

    def layer_bytes(self, batch: int = 1) -> float:
        """Weight bytes that one layer reads in a step of `batch` sequences.

        With experts this is an expectation: sequences choose experts independently and uniformly, so a batch reads
        E·(1 - (1 - k/E)^batch) of E experts.
        """
        weights = self.layer_params
        if self.num_experts:
            missed = (1 - self.experts_per_token / self.num_experts) ** batch
            weights += self._expert_share * self.num_experts * (1 - missed) * self.expert_params
        return weights * self.dtype_bytes

    def layer_flops(self) -> float:
        """Floating-point operations of one layer for one token, attention over the cache not counted."""
        return 2 * (self.layer_params + self._expert_share * self.experts_per_token * self.expert_params)

    def projection_bytes(self) -> float:
        """Weight bytes of a layer's key and value projections, which a prompt reads if it does not run the layer."""
        return self.hidden_size * 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def projection_flops(self) -> float:
        """Floating-point operations of one token's keys and values in one layer."""
        return 2.0 * self.hidden_size * 2 * self.num_kv_heads * self.head_dim

    def bridge_bytes(self, rank: float) -> float:
        """Weight bytes of a fit's bridge of `rank` over a layer."""
        return (2 * rank + 1) * self.hidden_size * self.dtype_bytes

    def fixed_bytes(self, batch: int = 1) -> float:
        """Bytes that a step of `batch` sequences reads at any depth: head, final norm, embedding rows."""
        return (self.head_params + batch * self.hidden_size) * self.dtype_bytes

    def fixed_flops(self) -> float:
        """Floating-point operations outside the layers for one token."""
        return 2.0 * self.head_params

    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def kv_flops_per_token(self) -> float:
        """Floating-point operations of one layer's attention for one token over one cached token."""
        return 4.0 * self.num_heads * self.head_dim

    def weight_bytes(self) -> float:
        """Bytes of all weights that the model holds."""
        return self.params * self.dtype_bytes

    @property
    def window_share(self) -> float:
        """Share of the layers that have sliding-window attention."""
        return len(self.windowed) / self.num_layers

    @property
    def _expert_share(self) -> float:
        return self.expert_layers / self.num_layers

    # ------------------------------------------------------------------ a text

    def kv_bytes_held(self, schedule: Schedule, prompt_len: int, new_tokens: int, batch: int = 1) -> int:
        """KV bytes at the end of a generation under a schedule; a skipped layer stores nothing.

        The last generated token is never fed back, so the cache holds `new_tokens` - 1 generated tokens.
        """
        schedule.check_fits(self.num_layers)
        on_prompt = {*schedule.prompt_layers(), *schedule.projected}
        fed, layout, total = max(new_tokens - 1, 0), KVLayout(1, round(self.kv_bytes_per_token())), 0
        for layer in range(self.num_layers):
            drop = schedule.drop_position(layer)
            held = (prompt_len if layer in on_prompt else 0) + (fed if drop is None else min(fed, drop))
            total += layout.bytes(min(held, self.window - 1) if layer in self.windowed else held)
        return batch * total

    def kv_bytes_saved(self, schedule: Schedule, prompt_len: int, new_tokens: int, batch: int = 1) -> int:
        """KV bytes that full depth would hold in addition to `kv_bytes_held`."""
        full = self.kv_bytes_held(Schedule.full(self.num_layers), prompt_len, new_tokens, batch)
        return full - self.kv_bytes_held(schedule, prompt_len, new_tokens, batch)


def _head_params(model: Any, layers: Any) -> int:
    """Weights outside the layers that every token reads, without embeddings that are looked up."""
    left_out = {*layers.parameters()}
    for module in model.modules():
        left_out |= {*module.parameters()} if isinstance(module, torch.nn.Embedding) else set()
    read = {*model.parameters()} - left_out | {*model.get_output_embeddings().parameters()}
    return sum(p.numel() for p in read)


@torch.inference_mode()
def _kv_shape(model: Any, layers: Any) -> tuple[int, int]:
    """Number and size of the key heads that the first layer stores; drops the other layers."""
    del layers[1:]
    with torch.device("meta"):
        cache = model(torch.zeros(1, 1, dtype=torch.long), use_cache=True)[model_cache_name(model)]
    _, heads, _, size = cache.layers[0].keys.shape
    return heads, size
