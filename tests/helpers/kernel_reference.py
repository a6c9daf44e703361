"""What the kernels compute, in plain torch and row by row: the oracle of their tests, which shares no arithmetic."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skipdecode.engine.kernels.library import load_library
from skipdecode.engine.kernels.native import NativeKernels, native_kernels
from skipdecode.engine.kernels.spec import AttentionSpec, LayerRows, LayerSpec, LinearSpec, StackInput
from skipdecode.engine.kernels.targets import find_compiler
from skipdecode.engine.kernels.weights import QuantizedWeight


def kernels_or_skip(dtype: torch.dtype = torch.bfloat16) -> NativeKernels:
    """The C++ kernels; skips the test where they cannot be built."""
    kernels, reason = native_kernels(torch.device("cpu"), dtype)
    if kernels is None:
        pytest.skip(reason)
    return kernels


@contextmanager
def compiled_with(*flags: str) -> Iterator[None]:
    """Kernels compiled with more flags, in place of those for this processor; the usual cache keeps them."""
    load_library.cache_clear()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        compiler, more = Path(folder) / "compiler", " ".join(flags)
        named = f'[ "$1" = --version ] && echo "with {more}"'
        compiler.write_text(f'#!/bin/sh\n{named}\nexec {find_compiler()} "$@" {more}\n')
        compiler.chmod(0o755)
        patch.setenv("CXX", str(compiler))
        load_library()
    try:
        yield
    finally:
        load_library.cache_clear()


def run_linear(kernels: NativeKernels, spec: LinearSpec, x: Tensor, add_to: Tensor | None = None) -> Tensor:
    """A linear operation on the C++ kernels; its results come on top of `add_to`."""
    out = torch.zeros(x.shape[0], spec.weight.shape[0]) if add_to is None else add_to.clone()
    kernels.linear(spec)(x, out, x.shape[0], add_to is not None)
    return out


def stack_case(
    spec: AttentionSpec, dtype: torch.dtype, slots: list[int], positions: list[int], depth: int = 2
) -> tuple[list[LayerSpec], StackInput]:
    """Layers of that attention, and rows whose keys and values lie in pages of 4 tokens, in random places."""
    hidden, wide = 24, 40
    columns = (spec.heads + 2 * spec.kv_heads) * spec.head_dim

    def weight(out: int, columns: int) -> Tensor:
        return torch.randn(out, columns) / columns**0.5

    layers = [
        LayerSpec(
            LinearSpec(weight(columns, hidden), torch.randn(columns), "rms_norm", torch.rand(hidden), eps=1e-5),
            spec,
            LinearSpec(weight(hidden, spec.heads * spec.head_dim)),
            LinearSpec(weight(2 * wide, hidden), None, "rms_norm", torch.rand(hidden), eps=1e-5),
            LinearSpec(weight(hidden, wide), None, "swiglu"),
        )
        for _ in range(depth)
    ]
    width, texts = -(-(max(positions) + 1) // 4), max(slots) + 1
    pages = torch.randn(depth * texts * width + 5, 2, spec.kv_heads, 4, spec.head_dim).to(dtype)
    table = torch.randperm(len(pages))[: depth * texts * width].view(depth, texts, width).int()
    rows = torch.tensor(slots, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)
    return layers, StackInput(
        torch.randn(len(slots), hidden), pages, table, *rows, [LayerRows(0, 0, len(slots))] * depth
    )


def reference_linear(spec: LinearSpec, x: Tensor) -> Tensor:
    """activation(prologue(x) @ weight.T + bias) in fp32."""
    weight = spec.weight.dequantize() if isinstance(spec.weight, QuantizedWeight) else spec.weight.float()
    columns = weight.shape[1]
    match spec.prologue:
        case "rms_norm":
            x = x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * spec.gamma
        case "layer_norm":
            x = functional.layer_norm(x, (columns,), spec.gamma, spec.beta, spec.eps)
        case "swiglu":
            x = x[:, :columns] * torch.sigmoid(x[:, :columns]) * x[:, columns:]
        case "geglu_tanh":
            x = functional.gelu(x[:, :columns], approximate="tanh") * x[:, columns:]
    y = x @ weight.T + (0 if spec.bias is None else spec.bias)
    match spec.activation:
        case "relu":
            return y.clamp(min=0)
        case "gelu_tanh":
            return functional.gelu(y, approximate="tanh")
    return y


def reference_stack(layers: list, given: StackInput) -> None:
    """The layers on the rows that run or store each of them; changes hidden states and pages."""
    for layer, table, (stored, runs, end) in zip(layers, given.table, given.layers, strict=True):
        qkv = reference_linear(layer.qkv, given.hidden[stored:end])
        x = given.hidden[runs:end]
        rows = list(zip(given.slots.tolist(), given.positions.tolist(), strict=True))[stored:end]
        attended = _attention(layer.attention, qkv, given.pages, table, rows)[runs - stored :]
        x += _normed(reference_linear(layer.out, attended), layer.out_gamma, layer.eps)
        x += _normed(reference_linear(layer.mlp_out, reference_linear(layer.mlp_in, x)), layer.mlp_gamma, layer.eps)


def _attention(spec: AttentionSpec, qkv: Tensor, pages: Tensor, table: Tensor, rows: list[tuple[int, int]]) -> Tensor:
    page_tokens, groups = pages.shape[3], spec.heads // spec.kv_heads
    queries = []
    for row, (slot, position) in enumerate(rows):
        heads = qkv[row].view(-1, spec.head_dim)
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads])
        queries.append(_placed(spec, q, spec.q_gamma, position))
        page = pages[table[slot, position // page_tokens]]
        page[0, :, position % page_tokens] = _placed(spec, k, spec.k_gamma, position).to(page.dtype)
        page[1, :, position % page_tokens] = v.to(page.dtype)
    out = torch.empty(len(rows), spec.heads, spec.head_dim)
    for row, (query, (slot, position)) in enumerate(zip(queries, rows, strict=True)):
        first = max(0, position - spec.window + 1) if spec.window else 0
        places = [(table[slot, p // page_tokens], p % page_tokens) for p in range(first, position + 1)]
        held = torch.stack([pages[page, :, :, at] for page, at in places], dim=2).float()  # (2, heads, n, dim)
        for head in range(spec.heads):
            keys, values = held[:, head // groups]
            out[row, head] = torch.softmax(keys @ query[head] * spec.scale, 0) @ values
    return out.flatten(1)


def _normed(x: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
    return x if gamma is None else x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gamma


def _placed(spec: AttentionSpec, heads: Tensor, gamma: Tensor | None, position: int) -> Tensor:
    """Heads (n, head_dim), normed and rotated: column i with column i + head_dim / 2, as complex numbers."""
    heads = _normed(heads, gamma, spec.eps)
    if spec.cos is None or spec.sin is None:
        return heads
    half = math.floor(spec.head_dim / 2)
    pairs = torch.complex(heads[:, :half], heads[:, half:]) * torch.complex(spec.cos[position], spec.sin[position])
    return torch.cat((pairs.real, pairs.imag), dim=1)
