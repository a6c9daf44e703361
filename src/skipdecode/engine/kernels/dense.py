"""Forwards over a static KV cache in torch operators: decode steps of fixed shape, and prompts.

A decode step runs a set of layers on the first `rows` places. Rows that are not to run one of them pass it by: its
output is added to theirs times 0, and what it stored for them is never read, since a row does not run a layer again
that it has skipped. So rows of different depth share a step of one shape. Nothing in it depends on data on the host,
and all it reads and leaves lies in tensors that stay: it can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.engine.kernels.quantize import QuantizedWeight
from skipdecode.engine.kernels.spec import AttentionSpec, LayerSpec, LinearSpec, ModelSpec
from skipdecode.engine.kernels.static_cache import StaticCache

__all__ = ["DenseDecoder", "Segment"]

# Heads' outputs (rows, heads * head_dim) of one layer from its queries, keys and values.
_Attend = Callable[[LayerSpec, int, Tensor], Tensor]


class Segment(NamedTuple):
    """Successive tokens of one prompt among the rows of a forward.

    Parameters
    ----------
    place : int
        Of its row in the cache.
    begin, end : int
        Rows.
    start : int
        Position of the first.
    """

    place: int
    begin: int
    end: int
    start: int


class DenseDecoder:
    """A decoder's forwards."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._dtype = spec.embedding.dtype

    def step(self, cache: StaticCache, rows: int, length: int, ran: Sequence[int]) -> None:
        """One token on each of the first `rows` places, through the layers `ran`; leaves `cache.logits`.

        Parameters
        ----------
        cache : StaticCache
            With its inputs loaded.
        rows : int
            Places of the step.
        length : int
            Columns that attention reads: above every position.
        ran : sequence of int
            Layers, ascending.
        """
        tokens, positions, columns = cache.inputs[:rows].unbind(1)
        layers = self._spec.layers
        x = self._spec.embed(tokens, positions, self._dtype)
        rotation = _rotation_at(layers[0].attention, positions, x.dtype)
        masks = {
            window: _additive_mask(positions, length, window, x.dtype)
            for window in {layers[index].attention.window for index in ran}
        }

        def attend(layer: LayerSpec, index: int, qkv: Tensor) -> Tensor:
            spec, (keys, values) = layer.attention, cache.kv[index]
            q, k, v = _heads_of(spec, qkv, rotation)
            keys[cache.index[:rows], :, columns] = k
            values[cache.index[:rows], :, columns] = v
            # The query heads that share a key head stand where a text's queries would: no key is copied for them.
            shared = q.reshape(rows, spec.kv_heads, -1, spec.head_dim)
            y = functional.scaled_dot_product_attention(
                shared,
                keys[:rows, :, :length],
                values[:rows, :, :length],
                attn_mask=masks[spec.window],
                scale=spec.scale,
            )
            return y.reshape(rows, -1)

        for index in ran:
            _run_layer(layers[index], index, x, attend, cache.active[index, :rows])
        cache.logits[:rows].copy_(_linear(self._spec.head, x))

    def prompts(
        self,
        cache: StaticCache,
        tokens: Tensor,
        positions: Tensor,
        segments: list[Segment],
        counts: list[int],
        wanted: Tensor,
    ) -> Tensor:
        """Logits (wanted rows, vocabulary) of parts of prompts.

        Parameters
        ----------
        cache : StaticCache
            Takes the keys and values.
        tokens, positions : torch.Tensor
            (rows,), int64 on the device.
        wanted : torch.Tensor
            Rows whose logits are wanted; int64 on the device.
        segments : list of Segment
            The rows' texts, in order.
        counts : list of int
            For each layer: the number of rows, from the first, that run it; whole segments.
        """
        layers = self._spec.layers
        x = self._spec.embed(tokens, positions, self._dtype)
        rotation = _rotation_at(layers[0].attention, positions, x.dtype)

        def attend(layer: LayerSpec, index: int, qkv: Tensor) -> Tensor:
            n = qkv.shape[0]
            turn = None if rotation is None else _Rotation(rotation.cos[:n], rotation.sin[:n])
            q, k, v = _heads_of(layer.attention, qkv, turn)
            parts = []
            for segment in (s for s in segments if s.end <= n):
                mine = (t[segment.begin : segment.end] for t in (q, k, v))
                parts.append(_attend_segment(layer.attention, cache.kv[index, :, segment.place], segment.start, *mine))
            return torch.cat(parts)

        for index, (layer, count) in enumerate(zip(layers, counts, strict=True)):
            if count:
                _run_layer(layer, index, x[:count], attend)
        x = x.index_select(0, wanted)
        return _linear(self._spec.head, x)


def _run_layer(layer: LayerSpec, index: int, x: Tensor, attend: _Attend, active: Tensor | None = None) -> None:
    """Change x (rows, hidden) in place, or only the rows where active (rows, 1) is 1."""

    def add(y: Tensor) -> None:
        x.add_(y) if active is None else x.addcmul_(y, active)

    add(_linear(layer.out, attend(layer, index, _linear(layer.qkv, x))))
    add(_linear(layer.mlp_out, _linear(layer.mlp_in, x)))


def _additive_mask(positions: Tensor, length: int, window: int, dtype: torch.dtype) -> Tensor:
    """(rows, 1, 1, length): 0 for the columns that a token sees, else minus infinity."""
    visible = _visible(positions, length, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~visible, -torch.inf)[:, None, None]


def _visible(positions: Tensor, length: int, window: int) -> Tensor:
    column = torch.arange(length, device=positions.device)
    visible = column <= positions.unsqueeze(1)
    if window:
        visible &= column > positions.unsqueeze(1) - window
    return visible


def _attend_segment(spec: AttentionSpec, kv: Tensor, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Store keys and values (tokens, kv_heads, head_dim) at a place's kv, and attend with q to all it holds."""
    keys, values = kv
    stop = start + len(q)
    keys[:, start:stop], values[:, start:stop] = k.transpose(0, 1), v.transpose(0, 1)
    repeat = spec.heads // spec.kv_heads
    seen_keys, seen_values = (t[:, :stop].repeat_interleave(repeat, dim=0).unsqueeze(0) for t in (keys, values))
    plain = start == 0 and not spec.window  # a case that fused kernels know
    mask = None if plain else _visible(torch.arange(start, stop, device=q.device), stop, spec.window)
    y = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), seen_keys, seen_values, attn_mask=mask, is_causal=plain, scale=spec.scale
    )
    return y[0].transpose(0, 1).reshape(len(q), -1)


# A layer's arithmetic: no shape depends on data, nothing waits for the device.


class _Rotation(NamedTuple):
    """Cosines (rows, 1, head_dim) of token rows, and sines likewise, negative for the first half of a head."""

    cos: Tensor
    sin: Tensor


def _linear(spec: LinearSpec, x: Tensor) -> Tensor:
    """What `spec` describes, of x (rows, columns)."""
    weight = spec.weight.dequantize(x.dtype) if isinstance(spec.weight, QuantizedWeight) else spec.weight
    y = functional.linear(_prologue(spec, x), weight, spec.bias)
    if spec.activation == "none":
        return y
    return functional.relu(y) if spec.activation == "relu" else functional.gelu(y, approximate="tanh")


def _rotation_at(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> _Rotation | None:
    """The rotation at positions (rows,), the same for all layers of a model; None without rotary positions."""
    if spec.cos is None or spec.sin is None:
        return None
    cos, sin = (t.index_select(0, positions).unsqueeze(1).to(dtype) for t in (spec.cos, spec.sin))
    return _Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def _heads_of(spec: AttentionSpec, qkv: Tensor, rotation: _Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (rows, heads, head_dim), normed and rotated."""
    heads = qkv.view(qkv.shape[0], -1, spec.head_dim)
    mixed, values = torch.split(heads, [spec.heads + spec.kv_heads, spec.kv_heads], dim=1)
    if spec.q_gamma is not None and spec.k_gamma is not None:
        parts = torch.split(mixed, [spec.heads, spec.kv_heads], dim=1)
        gammas = spec.q_gamma, spec.k_gamma
        normed = [_rms_norm(part, gamma, spec.eps) for part, gamma in zip(parts, gammas, strict=True)]
        mixed = torch.cat(normed, dim=1)
    if rotation is not None:
        # A head's halves change places; the signs are in sin.
        mixed = torch.addcmul(mixed * rotation.cos, mixed.roll(spec.head_dim // 2, -1), rotation.sin)
    queries, keys = torch.split(mixed, [spec.heads, spec.kv_heads], dim=1)
    return queries, keys, values


def _prologue(spec: LinearSpec, x: Tensor) -> Tensor:
    width = spec.weight.shape[1]
    if spec.prologue == "rms_norm":
        return _rms_norm(x, spec.gamma, spec.eps)
    if spec.prologue == "layer_norm":
        return functional.layer_norm(x, (width,), spec.gamma, spec.beta, spec.eps)
    if spec.prologue == "swiglu":
        return functional.silu(x[:, :width]) * x[:, width:]
    if spec.prologue == "geglu_tanh":
        return functional.gelu(x[:, :width], approximate="tanh") * x[:, width:]
    return x


def _rms_norm(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), gamma, eps)
