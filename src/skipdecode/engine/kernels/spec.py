"""Data classes that describe the computations of the kernels, and checks of their sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from skipdecode.engine.kernels.weights import QuantizedWeight
from skipdecode.errors import FitError, UnfitModelError

Prologue = Literal["none", "rms_norm", "layer_norm", "swiglu", "geglu_tanh"]
Activation = Literal["none", "relu", "relu_squared", "gelu_tanh", "xielu"]


@dataclass(frozen=True)
class LinearSpec:
    """y = activation(prologue(x) @ weight.T + bias)."""

    weight: torch.Tensor | QuantizedWeight  # (out, in), contiguous rows
    bias: torch.Tensor | None = None  # (out,)
    # Applied to x first: a norm over its columns, or a gated activation of 2 * in columns (gate, then up).
    prologue: Prologue = "none"
    # (in,): scale and shift of the norm.
    gamma: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    eps: float = 0.0  # added to the norm's mean of squares
    # Applied to the result; of xIELU, the factors of its positive and negative branch, and beta.
    activation: Activation = "none"
    constants: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it holds."""
        return self.weight.nbytes + sum(t.nbytes for t in (self.bias, self.gamma, self.beta) if t is not None)


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of token rows over paged keys and values."""

    # Query heads, key/value heads, columns of one.
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # factor of the scores
    window: int = 0  # number of latest tokens that a row attends to, with its own; 0 means all
    # (positions, rotated columns / 2), fp32: rotary positions of the first columns of a head. None: no rotation.
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    # RMSNorm of queries and keys: of each head (head_dim,), or of all heads together (heads * head_dim,).
    q_gamma: torch.Tensor | None = None
    k_gamma: torch.Tensor | None = None
    eps: float = 0.0  # added to that norm's mean of squares
    pairs: bool = False  # neighbouring columns are rotated against each other, not halves
    # Of each head before or after the rotation, or ("wide") of all heads together before it.
    norm: Literal["before", "after", "wide"] = "before"
    q_scale: torch.Tensor | None = None  # (positions,): factors of the queries
    cap: float = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    # (1 + width, heads * head_dim): a bias, and the taps of a short convolution that stands for attention, the oldest
    # token's first. Of the parts B, C and x of `qkv` it makes C * (bias + the sum of tap * B * x of a token).
    taps: torch.Tensor | None = None


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
    """The fitted maps that replace skipped layers; see `skipdecode.models.fit`."""

    # By layer: the operation `down` on normed states, and the operation `up`, whose result is added.
    bridges: Mapping[int, tuple[LinearSpec, LinearSpec]]
    # By layer: keys and values (key columns first) from features. The features are normed states, the token's own
    # first. Without preceding tokens the operation norms the states itself.
    maps: Mapping[int, LinearSpec]
    first: Mapping[int, torch.Tensor]  # by layer of `maps`: keys and values at position 0, in place of the map
    context_tokens: int = 0  # number of preceding tokens in the features of a row


@dataclass(frozen=True)
class ModelSpec:
    """A decoder."""

    layers: list[LayerSpec]  # first to last
    head: LinearSpec  # final norm and output embedding
    embedding: torch.Tensor  # (vocabulary, hidden)
    embedding_scale: float = 1.0  # factor of the embeddings
    position_embedding: torch.Tensor | None = None  # (positions + offset, hidden): learned positions
    position_offset: int = 0  # row of position 0
    max_positions: int | None = None  # number of learned positions
    logit_cap: float | None = None  # logits become cap * tanh(logit / cap)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """New hidden states (rows, hidden) of tokens (rows,) at positions (rows,)."""
        hidden = self.embedding.index_select(0, tokens).to(dtype) * self.embedding_scale
        if self.position_embedding is not None:
            hidden = hidden + self.position_embedding.index_select(0, positions + self.position_offset)
        return hidden


class LayerRows(NamedTuple):
    """The rows of a forward in one layer.

    Rows `stored` to before `runs` only store keys and values, rows `runs` to before `end` run the layer. The others
    skip the layer.
    """

    stored: int
    runs: int
    end: int


class StackInput(NamedTuple):
    """The input of a stack of layers."""

    hidden: torch.Tensor  # (rows, hidden), changed in place
    pages: torch.Tensor  # keys and values: (pages, 2, kv_heads, page_tokens, head_dim)
    table: torch.Tensor  # (layers, slots, width), int32 on the CPU: a slot's pages in each layer, in order
    # (rows,), int32 on the CPU.
    slots: torch.Tensor
    positions: torch.Tensor
    layers: list[LayerRows]
    bridged: int = 0  # from this row on, rows take the bridges of the layers that they skip
    # (rows, context tokens), int32, for projected rows: the rows of the preceding tokens; -1 where there is none.
    context_rows: torch.Tensor | None = None


# ---------------------------------------------------------------------- sizes
# A kernel that is told a wrong size writes past its buffers.


def check_linear(spec: LinearSpec) -> None:
    """Raise UnfitModelError unless the vectors of an operation are as long as its weight has rows or columns."""
    rows, columns = spec.weight.shape
    vectors = ((spec.bias, rows), (spec.gamma, columns), (spec.beta, columns))
    if any(vector is not None and vector.numel() != size for vector, size in vectors):
        raise UnfitModelError(f"a bias or norm does not go with the weight of {rows} rows and {columns} columns")


def check_layers(layers: Sequence[LayerSpec]) -> None:
    """Raise UnfitModelError unless all layers are of one geometry, whose parts fit together."""
    width, rows = layers[0].qkv.weight.shape[1], {x.qkv.weight.shape[0] for x in layers if x.attention.taps is None}
    for number, layer in enumerate(layers):
        attention = layer.attention
        heads = attention.heads * attention.head_dim
        inner = layer.mlp_in.weight.shape[0]
        wanted = {
            "qkv": (heads + 2 * attention.kv_heads * attention.head_dim, width),
            "out": (width, heads),
            "mlp_in": (layers[0].mlp_in.weight.shape[0], width),
            "mlp_out": (width, inner if layer.mlp_out.prologue == "none" else inner // 2),
        }
        for name, shape in wanted.items():
            if (actual := tuple(getattr(layer, name).weight.shape)) != shape:
                raise UnfitModelError(f"{name} of layer {number} is of shape {actual}, the fast path needs {shape}")
        vectors = [(layer.out_gamma, width), (layer.mlp_gamma, width)]
        sizes = (
            (heads, attention.kv_heads * attention.head_dim) if attention.norm == "wide" else 2 * [attention.head_dim]
        )
        vectors += zip((attention.q_gamma, attention.k_gamma), sizes, strict=True)
        if attention.cos is not None and 2 * attention.cos.shape[1] > attention.head_dim:
            raise UnfitModelError(f"attention of layer {number} rotates more columns than a head has")
        if any(vector is not None and vector.numel() != size for vector, size in vectors):
            raise UnfitModelError(f"a norm of layer {number} has another size than its layer")
        if len(rows) != 1 or heads != layers[0].out.weight.shape[1]:
            raise UnfitModelError(f"attention of layer {number} has another number of heads than that of layer 0")


def check_fit(fit: FitSpec, layers: Sequence[LayerSpec]) -> None:
    """Raise FitError unless the maps of a fit have the sizes of the layers."""
    width, attention = layers[0].qkv.weight.shape[1], layers[0].attention
    keys = 2 * attention.kv_heads * attention.head_dim
    for number, (down, up) in fit.bridges.items():
        rank = down.weight.shape[0]
        right = tuple(down.weight.shape) == (rank, width) and tuple(up.weight.shape) == (width, rank)
        _of_layer(right and rank > 0, number, len(layers))
    for number, linear in fit.maps.items():
        right = tuple(linear.weight.shape) == (keys, (fit.context_tokens + 1) * width)
        _of_layer(right and fit.first[number].numel() == keys, number, len(layers))


def check_input(inputs: StackInput, layers: int, width: int, kv_heads: int, dim: int, context_tokens: int) -> None:
    """Raise UnfitModelError unless an input is for so many layers of these sizes."""
    rows, context = inputs.hidden.shape[0], inputs.context_rows
    right = inputs.hidden.shape[1] == width and min(inputs.slots.numel(), inputs.positions.numel()) >= rows
    right = right and len(inputs.layers) == inputs.table.shape[0] == layers
    right = right and inputs.pages.shape[1:3] == (2, kv_heads) and inputs.pages.shape[4] == dim
    if not right or (context is not None and context.numel() < rows * context_tokens):
        raise UnfitModelError("states, keys and values, or their places have other sizes than the layers: report this")


def _of_layer(right: bool, number: int, layers: int) -> None:
    if not right or not 0 <= number < layers:
        raise FitError(f"the fit of layer {number} has other sizes than the model: make one with skipdecode prepare")
