"""Checks of sizes before the kernels get addresses: a kernel that is told a wrong one writes past its buffers."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.engine.kernels.spec import FitSpec, LayerSpec, LinearSpec, StackInput
from skipdecode.errors import FitError, UnfitModelError


def check_linear(spec: LinearSpec) -> None:
    """Raise UnfitModelError unless the vectors of an operation are as long as its weight has rows or columns."""
    rows, columns = spec.weight.shape
    vectors = ((spec.bias, rows), (spec.gamma, columns), (spec.beta, columns))
    if any(vector is not None and vector.numel() != size for vector, size in vectors):
        raise UnfitModelError(f"a bias or norm does not go with the weight of {rows} rows and {columns} columns")


def check_layers(layers: Sequence[LayerSpec]) -> None:
    """Raise UnfitModelError unless all layers are of one geometry, whose parts fit together."""
    width = layers[0].qkv.weight.shape[1]
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
            if (found := tuple(getattr(layer, name).weight.shape)) != shape:
                raise UnfitModelError(f"{name} of layer {number} is of shape {found}, the fast path needs {shape}")
        vectors = [(layer.out_gamma, width), (layer.mlp_gamma, width)]
        vectors += [(attention.q_gamma, attention.head_dim), (attention.k_gamma, attention.head_dim)]
        if any(vector is not None and vector.numel() != size for vector, size in vectors):
            raise UnfitModelError(f"a norm of layer {number} has another size than its layer")
        if wanted["qkv"][0] != layers[0].qkv.weight.shape[0] or heads != layers[0].out.weight.shape[1]:
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
        right = tuple(linear.weight.shape) == (keys, (fit.taps + 1) * width)
        _of_layer(right and fit.first[number].numel() == keys, number, len(layers))


def check_input(given: StackInput, layers: int, width: int, kv_heads: int, dim: int, taps: int) -> None:
    """Raise UnfitModelError unless an input is for so many layers of these sizes."""
    rows, before = given.hidden.shape[0], given.before
    right = given.hidden.shape[1] == width and min(given.slots.numel(), given.positions.numel()) >= rows
    right = right and len(given.layers) == given.table.shape[0] == layers
    right = right and given.pages.shape[1:3] == (2, kv_heads) and given.pages.shape[4] == dim
    if not right or (before is not None and before.numel() < rows * taps):
        raise UnfitModelError("states, keys and values, or their places have other sizes than the layers: report this")


def _of_layer(right: bool, number: int, layers: int) -> None:
    if not right or not 0 <= number < layers:
        raise FitError(f"the fit of layer {number} has other sizes than the model: make one with skipdecode calibrate")
