"""What the kernels compute, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from skipdecode.engine.kernels.quantize import QuantizedWeight

__all__ = [
    "Activation",
    "AttentionSpec",
    "FitSpec",
    "LayerSpec",
    "LinearSpec",
    "ModelSpec",
    "Prologue",
    "StackInput",
]

Prologue = Literal["none", "rms_norm", "layer_norm", "swiglu", "geglu_tanh"]
Activation = Literal["none", "relu", "gelu_tanh"]


@dataclass(frozen=True)
class LinearSpec:
    """y = activation(prologue(x) @ weight.T + bias).

    Parameters
    ----------
    weight : torch.Tensor or QuantizedWeight
        (out, in), contiguous rows.
    bias : torch.Tensor, optional
        (out,).
    prologue : str
        Applied to x first: a norm over its columns, or a gated activation of 2 * in columns (gate, then up).
    gamma, beta : torch.Tensor, optional
        (in,): scale and shift of the norm.
    eps : float
        Added to the norm's mean of squares.
    activation : str
        Applied to the result.
    """

    weight: torch.Tensor | QuantizedWeight
    bias: torch.Tensor | None = None
    prologue: Prologue = "none"
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    eps: float = 0.0
    activation: Activation = "none"


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of token rows over paged keys and values.

    Parameters
    ----------
    heads, kv_heads, head_dim : int
        Query heads, key/value heads, columns of one.
    scale : float
        Factor of the scores.
    window : int
        Latest tokens a row sees, its own included; 0 means all.
    cos, sin : torch.Tensor, optional
        (positions, head_dim / 2), fp32: rotary positions (halves rotated against each other). Without: none.
    q_gamma, k_gamma : torch.Tensor, optional
        (head_dim,): RMSNorm of each query and key head, before the rotation.
    eps : float
        Added to that norm's mean of squares.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    q_gamma: torch.Tensor | None = None
    k_gamma: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class LayerSpec:
    """A decoder layer: x += out(attention(qkv(x))); x += mlp_out(mlp_in(x)); norms and gates are prologues.

    With `out_gamma` and `mlp_gamma` (hidden,) an RMSNorm of what is added comes first; `eps` is that norm's.
    """

    qkv: LinearSpec
    attention: AttentionSpec
    out: LinearSpec
    mlp_in: LinearSpec
    mlp_out: LinearSpec
    out_gamma: torch.Tensor | None = None
    mlp_gamma: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class FitSpec:
    """What stands in for layers that rows do not run; see `skipdecode.models.fit`.

    Parameters
    ----------
    bridges : mapping of int to pair of LinearSpec
        By layer, the operations `down`, of normed states, and `up`, whose result is added.
    maps : mapping of int to LinearSpec
        By layer, keys and values (key columns first) of features: normed states, the token's own first. Without taps
        the operation norms them itself.
    first : mapping of int to torch.Tensor
        By layer of `maps`, what stands for the map at position 0.
    taps : int
        Tokens before its own in a row's features.
    """

    bridges: Mapping[int, tuple[LinearSpec, LinearSpec]]
    maps: Mapping[int, LinearSpec]
    first: Mapping[int, torch.Tensor]
    taps: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """A decoder.

    Parameters
    ----------
    layers : list of LayerSpec
        First to last.
    head : LinearSpec
        Final norm and output embedding.
    embedding : torch.Tensor
        (vocabulary, hidden).
    embedding_scale : float
        Factor of the embeddings.
    position_embedding : torch.Tensor, optional
        (positions + offset, hidden): learned positions.
    position_offset : int
        Row of position 0.
    max_positions : int, optional
        Most positions, where learned.
    """

    layers: list[LayerSpec]
    head: LinearSpec
    embedding: torch.Tensor
    embedding_scale: float = 1.0
    position_embedding: torch.Tensor | None = None
    position_offset: int = 0
    max_positions: int | None = None

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Hidden states (rows, hidden), new ones, of tokens (rows,) at positions (rows,)."""
        hidden = self.embedding.index_select(0, tokens).to(dtype) * self.embedding_scale
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.index_select(0, positions + self.position_offset)
        return hidden


class StackInput(NamedTuple):
    """What a stack of layers runs on.

    Parameters
    ----------
    hidden : torch.Tensor
        (rows, hidden), changed in place.
    pages : torch.Tensor
        Keys and values: (pages, 2, kv_heads, page_tokens, head_dim).
    table : torch.Tensor
        (layers, slots, width), int32 on the CPU: a slot's pages in each layer, in order.
    slots, positions : torch.Tensor
        (rows,), int32 on the CPU.
    counts : list of int
        How many rows, from the first, run each layer.
    stored : list of int, optional
        How many rows, from the first, leave their keys and values in each layer: those that run it, and others that
        are only projected. Default: `counts`.
    bridged : list of (int, int), optional
        For each layer the first row that takes its bridge, and the first behind them that does not.
    before : torch.Tensor, optional
        (rows, taps), int32: the rows of the tokens before each, -1 where there is none; for rows that are projected.
    """

    hidden: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    counts: list[int]
    stored: list[int] | None = None
    bridged: list[tuple[int, int]] | None = None
    before: torch.Tensor | None = None
