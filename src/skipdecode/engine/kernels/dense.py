"""Forwards over a static KV cache in torch operators: decode steps of fixed shape, and prompts.

A decode step runs a set of layers on the first `rows` places. Rows that are not to run one of them pass it by: its
output is added to theirs times 0, and what it stored for them is never read, since a row does not run a layer again
that it has skipped. So rows of different depth share a step of one shape. Nothing in it depends on data on the host,
and all it reads and leaves lies in tensors that stay: it can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
        The prompt's row in the cache.
    begin, end : int
        The tokens' rows in the forward.
    start : int
        Position of the first token.
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
            Its inputs are loaded.
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
        rotations = _rotations(layers, positions, x.dtype)
        masks = {
            window: _additive_mask(positions, length, window, x.dtype)
            for window in {layers[index].attention.window for index in ran}
        }

        def attend(layer: LayerSpec, index: int, qkv: Tensor) -> Tensor:
            spec, (keys, values) = layer.attention, cache.kv[index]
            q, k, v = _heads_of(spec, qkv, rotations.get(id(spec.cos)))
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
        stored: list[int],
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
            How many rows, from the first, run each layer; whole segments.
        stored : list of int
            How many leave their keys and values in it; whole segments.
        """
        layers = self._spec.layers
        x = self._spec.embed(tokens, positions, self._dtype)
        rotations = _rotations(layers, positions, x.dtype)

        def turned(spec: AttentionSpec, begin: int, end: int) -> _Rotation | None:
            rotation = rotations.get(id(spec.cos))
            return None if rotation is None else _Rotation(rotation.cos[begin:end], rotation.sin[begin:end])

        def store(index: int, begin: int, keys: Tensor, values: Tensor) -> None:
            for each in (s for s in segments if begin <= s.begin and s.end <= begin + len(keys)):
                there = slice(each.start, each.start + each.end - each.begin)
                for kept, new in zip(cache.kv[index, :, each.place], (keys, values), strict=True):
                    kept[:, there] = new[each.begin - begin : each.end - begin].transpose(0, 1)

        def attend(layer: LayerSpec, index: int, qkv: Tensor) -> Tensor:
            n = qkv.shape[0]
            q, k, v = _heads_of(layer.attention, qkv, turned(layer.attention, 0, n))
            store(index, 0, k, v)
            return torch.cat(
                [
                    _attend_segment(layer.attention, cache.kv[index, :, s.place], s.start, q[s.begin : s.end])
                    for s in segments
                    if s.end <= n
                ]
            )

        for index, (layer, count, kept) in enumerate(zip(layers, counts, stored, strict=True)):
            if kept > count:
                projected = _linear(_keys_and_values(layer, x.dtype), x[count:kept])
                store(index, count, *_turned_keys(layer.attention, projected, turned(layer.attention, count, kept)))
            if count:
                _run_layer(layer, index, x[:count], attend)
        return _linear(self._spec.head, x.index_select(0, wanted))


def _run_layer(layer: LayerSpec, index: int, x: Tensor, attend: _Attend, active: Tensor | None = None) -> None:
    """Change x (rows, hidden) in place, or only the rows where active (rows, 1) is 1."""

    def add(y: Tensor, gamma: Tensor | None) -> None:
        y = y if gamma is None else _rms_norm(y, gamma, layer.eps)
        x.add_(y) if active is None else x.addcmul_(y, active)

    add(_linear(layer.out, attend(layer, index, _linear(layer.qkv, x))), layer.out_gamma)
    add(_linear(layer.mlp_out, _linear(layer.mlp_in, x)), layer.mlp_gamma)


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


def _attend_segment(spec: AttentionSpec, kv: Tensor, start: int, q: Tensor) -> Tensor:
    """Attend with q (tokens, heads, head_dim), from position `start` on, to what a place's kv holds."""
    keys, values = kv
    stop = start + len(q)
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
    y = functional.linear(_prologue(spec, x), _weight(spec, x.dtype), spec.bias)
    if spec.activation == "none":
        return y
    return functional.relu(y) if spec.activation == "relu" else functional.gelu(y, approximate="tanh")


def _rotations(layers: list[LayerSpec], positions: Tensor, dtype: torch.dtype) -> dict[int, _Rotation]:
    """The rotations at positions (rows,), by the `id` of the cosines, which layers share; none without rotary ones."""
    found = {}
    for spec in {id(layer.attention.cos): layer.attention for layer in layers}.values():
        if spec.cos is not None and spec.sin is not None:
            cos, sin = (t.index_select(0, positions).unsqueeze(1).to(dtype) for t in (spec.cos, spec.sin))
            found[id(spec.cos)] = _Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    return found


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
        mixed = _rotated(mixed, rotation)
    queries, keys = torch.split(mixed, [spec.heads, spec.kv_heads], dim=1)
    return queries, keys, values


def _keys_and_values(layer: LayerSpec, dtype: torch.dtype) -> LinearSpec:
    """The part of the fused product that makes keys and values."""
    queries = layer.attention.heads * layer.attention.head_dim
    bias = None if layer.qkv.bias is None else layer.qkv.bias[queries:]
    return replace(layer.qkv, weight=_weight(layer.qkv, dtype)[queries:], bias=bias)


def _weight(spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    return spec.weight.dequantize(dtype) if isinstance(spec.weight, QuantizedWeight) else spec.weight


def _turned_keys(spec: AttentionSpec, projected: Tensor, rotation: _Rotation | None) -> tuple[Tensor, Tensor]:
    """Keys and values (rows, kv_heads, head_dim), normed and rotated, of what `_keys_and_values` makes."""
    keys, values = projected.view(len(projected), 2, spec.kv_heads, spec.head_dim).unbind(1)
    if spec.k_gamma is not None:
        keys = _rms_norm(keys, spec.k_gamma, spec.eps)
    return (keys if rotation is None else _rotated(keys, rotation)), values


def _rotated(heads: Tensor, rotation: _Rotation) -> Tensor:
    # A head's halves change places; the signs are in sin.
    return torch.addcmul(heads * rotation.cos, heads.roll(heads.shape[-1] // 2, -1), rotation.sin)


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
    wide = x if gamma is None else x.to(gamma.dtype)
    return functional.rms_norm(wide, (x.shape[-1],), gamma, eps).to(x.dtype)
