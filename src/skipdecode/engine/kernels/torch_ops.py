"""A layer's arithmetic in torch operators, for any device: no shape depends on data, nothing waits for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.engine.kernels.quantize import QuantizedWeight
from skipdecode.engine.kernels.spec import AttentionSpec, LinearSpec

__all__ = ["Rotation", "apply_linear", "heads_of", "plain_weight", "rotation_at"]


class Rotation(NamedTuple):
    """Of token rows: cos (rows, 1, head_dim), and sin likewise, negative for the first half of a head."""

    cos: Tensor
    sin: Tensor


def plain_weight(spec: LinearSpec, dtype: torch.dtype) -> Tensor:
    """The (out, in) matrix, dequantised if need be."""
    return spec.weight.dequantize(dtype) if isinstance(spec.weight, QuantizedWeight) else spec.weight


def apply_linear(spec: LinearSpec, x: Tensor, weight: Tensor) -> Tensor:
    """What `spec` describes, of x (rows, columns), with the matrix of `plain_weight`."""
    y = functional.linear(_prologue(spec, x), weight, spec.bias)
    if spec.activation == "none":
        return y
    return functional.relu(y) if spec.activation == "relu" else functional.gelu(y, approximate="tanh")


def rotation_at(spec: AttentionSpec, positions: Tensor, dtype: torch.dtype) -> Rotation | None:
    """The rotation at positions (rows,), the same for all layers of a model; None without rotary positions."""
    if spec.cos is None or spec.sin is None:
        return None
    cos, sin = (t.index_select(0, positions).unsqueeze(1).to(dtype) for t in (spec.cos, spec.sin))
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def heads_of(spec: AttentionSpec, qkv: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
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
