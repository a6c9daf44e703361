"""Data classes that describe the computations of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from skipdecode.engine.depth import LayerRows
from skipdecode.engine.kernels.quantize import QuantizedWeight

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

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return self.weight.nbytes + sum(t.nbytes for t in (self.bias, self.gamma, self.beta) if t is not None)


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
        Number of latest tokens that a row attends to, with its own; 0 means all.
    cos, sin : torch.Tensor, optional
        (positions, head_dim / 2), fp32: rotary positions (halves rotated against each other). None: no rotation.
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

    With `out_gamma` and `mlp_gamma` (hidden,), an RMSNorm with `eps` applies to the output of a sublayer before it is
    added.
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
    """The fitted maps that replace skipped layers; see `skipdecode.models.fit`.

    Parameters
    ----------
    bridges : mapping of int to pair of LinearSpec
        By layer: the operation `down` on normed states, and the operation `up`, whose result is added.
    maps : mapping of int to LinearSpec
        By layer: keys and values (key columns first) from features. The features are normed states, the token's own
        first. Without taps the operation norms the states itself.
    first : mapping of int to torch.Tensor
        By layer of `maps`: keys and values at position 0, in place of the map.
    taps : int
        Number of preceding tokens in the features of a row.
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
        Number of learned positions.
    """

    layers: list[LayerSpec]
    head: LinearSpec
    embedding: torch.Tensor
    embedding_scale: float = 1.0
    position_embedding: torch.Tensor | None = None
    position_offset: int = 0
    max_positions: int | None = None

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """New hidden states (rows, hidden) of tokens (rows,) at positions (rows,)."""
        hidden = self.embedding.index_select(0, tokens).to(dtype) * self.embedding_scale
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.index_select(0, positions + self.position_offset)
        return hidden


class StackInput(NamedTuple):
    """The input of a stack of layers.

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
    layers : list of LayerRows
    bridged : int
        From this row on, rows take the bridges of the layers that they skip.
    before : torch.Tensor, optional
        (rows, taps), int32, for projected rows: the rows of the preceding tokens; -1 where there is none.
    """

    hidden: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    layers: list[LayerRows]
    bridged: int = 0
    before: torch.Tensor | None = None
