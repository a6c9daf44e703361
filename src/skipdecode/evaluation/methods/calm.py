"""Confidence exit with hidden-state copying, after CALM (arXiv 2207.07061): each token stops when it looks settled.

A token that has left is handed up unchanged, and every layer above still computes keys and values from that copy, so
later tokens find them. In a batch a layer runs for all rows while one of them needs it: that is the method's real cost,
and it is what is counted and timed here. Prompts run at full depth; the exit needs no training of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from skipdecode.errors import UnsupportedModelError, UsageError
from skipdecode.evaluation.methods.base import GenerateMethod
from skipdecode.models.families import decoder_layers, unwrap

__all__ = ["MEASURES", "Calm"]

MEASURES = ("softmax", "state")
# Families whose keys are projections of the normed input, normed or not, then rotated: what `_store` computes.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class Calm(GenerateMethod):
    """Exit where confidence exceeds a threshold, checked after every layer from `min_exit_layer` on.

    Parameters
    ----------
    threshold : float
        0 exits at `min_exit_layer`, above 1 never.
    measure : {"softmax", "state"}
        ``softmax``: the difference of the two largest next-token probabilities, which costs the head at every layer.
        ``state``: cosine similarity of a layer's output and input.
    min_exit_layer : int
        Layers that always run.
    """

    def __init__(
        self, threshold: float = 0.9, measure: Literal["softmax", "state"] = "softmax", min_exit_layer: int = 1
    ) -> None:
        if measure not in MEASURES:
            raise UsageError(f"CALM measure {measure!r} is not accepted: give one of {', '.join(MEASURES)}")
        if not threshold >= 0:
            raise UsageError(f"CALM threshold {threshold} is not accepted: give 0 or more")
        self.threshold = threshold
        self.measure = measure
        self.min_exit_layer = min_exit_layer
        self.name = f"calm-{measure}-{threshold:g}"

    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "threshold": self.threshold,
            "measure": self.measure,
            "min_exit_layer": self.min_exit_layer,
        }

    def check_shape(self, model_type: str, num_layers: int) -> None:
        """Raises UnsupportedModelError for families whose keys it cannot compute alone, UsageError for a wrong exit."""
        if model_type not in _FAMILIES:
            raise UnsupportedModelError(f"CALM is not supported for {model_type}: it is for {', '.join(_FAMILIES)}")
        if not 1 <= self.min_exit_layer <= num_layers:
            raise UsageError(f"min_exit_layer={self.min_exit_layer} is not accepted: give 1 to {num_layers}")

    @contextmanager
    def around(self, model: Any, eos: frozenset[int]) -> Iterator[_Exits]:
        """The model with exits in front of its layers."""
        plain = unwrap(model)
        exits = _Exits(self, plain, eos)
        layers = decoder_layers(plain)
        hook = plain.register_forward_pre_hook(exits.begin, with_kwargs=True)
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(exits.layer, index, layer, layer.forward)
        try:
            yield exits
        finally:
            hook.remove()
            for layer in layers:
                del layer.forward


class _Exits:
    """Which rows have left in the step at hand."""

    def __init__(self, calm: Calm, model: Any, eos: frozenset[int]) -> None:
        self._calm = calm
        self._norm = model.get_decoder().norm
        self._head = model.get_output_embeddings()
        self._eos = torch.tensor(sorted(eos), dtype=torch.long, device=model.device)
        self._decoding = False
        self._prompt_seen = False
        self._gone = torch.empty(0, dtype=torch.bool)
        self._rows = 0
        self._last = len(decoder_layers(model)) - 1
        self._layer_tokens = 0

    def layers_of(self, rows: list[list[int]], prompt_tokens: int) -> int:
        """Layers that ran in each step, for every row that was still being decoded in it."""
        return self._layer_tokens

    def begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward starts: the first is the prompt's."""
        self._decoding, self._prompt_seen = self._prompt_seen, True
        tokens = args[0] if args else kwargs["input_ids"]
        # A row that is fed its end token, or padding, has ended: it must not keep the others in the deep layers.
        self._gone = torch.isin(tokens[:, -1], self._eos)
        self._rows = int((~self._gone).sum())

    def layer(
        self, index: int, layer: Any, forward: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """A decoder layer: run it, or only store keys and values of the copied states."""
        if not self._decoding:
            return forward(hidden_states, *args, **kwargs)
        if bool(self._gone.all()):
            _store(layer, index, hidden_states, kwargs)
            return hidden_states
        output: Tensor = torch.where(self._gone[:, None, None], hidden_states, forward(hidden_states, *args, **kwargs))
        self._layer_tokens += self._rows
        if self._calm.min_exit_layer <= index + 1 <= self._last:
            self._gone |= self._confidence(hidden_states, output) >= self._calm.threshold
        return output

    def _confidence(self, before: Tensor, after: Tensor) -> Tensor:
        if self._calm.measure == "state":
            return torch.cosine_similarity(before[:, -1].float(), after[:, -1].float(), dim=-1)
        probabilities: Tensor = self._head(self._norm(after[:, -1])).float().softmax(-1)
        first, second = probabilities.topk(2, dim=-1).values.unbind(-1)
        difference: Tensor = first - second
        return difference


def _store(layer: Any, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> None:
    """Put the keys and values of `hidden` (rows, 1, width) into the cache without running the layer."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    keys, values = attention.k_proj(normed).view(shape), attention.v_proj(normed).view(shape)
    if hasattr(attention, "k_norm"):
        keys = attention.k_norm(keys)
    keys = keys.transpose(1, 2)
    _, keys = apply_rotary_pos_emb(keys, keys, *kwargs["position_embeddings"])
    kwargs["past_key_values"].update(keys, values.transpose(1, 2), index)
