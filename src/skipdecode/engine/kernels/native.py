"""The C++ kernels behind the `Backend` interface. One call costs about a microsecond on top of its work.

Activations between operations are fp32. Weights are bf16, fp32, int8 or int4; cached keys and values are bf16 or fp32.
With a bf16 model on a CPU that multiplies bf16, activations are rounded to bf16 where they meet weights, as in torch. A
row's result does not depend, bit for bit, on the other rows of the call.
"""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch

from skipdecode.engine.kernels.build import load_library
from skipdecode.engine.kernels.native_args import AttentionArgs, LayerArgs, LinearArgs, StackArgs
from skipdecode.engine.kernels.quantize import QuantizedWeight
from skipdecode.engine.kernels.spec import (
    AttentionCall,
    AttentionSpec,
    LayerSpec,
    LinearCall,
    LinearSpec,
    StackCall,
    StackInput,
)

__all__ = ["WEIGHT_DTYPES", "NativeBackend"]

WEIGHT_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_QUANTIZED = {"int8": 2, "int4": 3}
_PROLOGUES = {"none": 0, "rms_norm": 1, "layer_norm": 2, "swiglu": 3, "geglu_tanh": 4}
_ACTIVATIONS = {"none": 0, "relu": 1, "gelu_tanh": 2}


class NativeBackend:
    """Kernels built on first use for this CPU; raises KernelBuildError where that fails.

    Parameters
    ----------
    dtype : torch.dtype
        Of the model: fp32 activations meet quantised weights unrounded, others as bf16.
    """

    name = "native"

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        library = load_library()
        self._round = dtype != torch.float32
        self._linear, self._attention = library.skipdecode_linear, library.skipdecode_attention
        self._stack = library.skipdecode_stack
        for function in (self._linear, self._attention, self._stack):
            function.argtypes, function.restype = [ctypes.c_void_p], None

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """Always fp32."""
        return torch.float32

    def linear(self, spec: LinearSpec) -> LinearCall:
        """See `Backend`; x and out are fp32 with contiguous rows."""
        keep: list[Any] = []
        args = self._linear_args(spec, keep)
        function, address = self._linear, ctypes.addressof(args)

        def call(x: torch.Tensor, out: torch.Tensor, rows: int, accumulate: bool) -> None:
            args.x, args.y, args.m = x.data_ptr(), out.data_ptr(), rows
            args.ldx, args.ldy, args.accumulate = x.stride(0), out.stride(0), accumulate
            function(address)

        call.keep = (keep, args)  # type: ignore[attr-defined]  # the C++ side holds only their addresses
        return call

    def attention(self, spec: AttentionSpec) -> AttentionCall:
        """See `Backend`; qkv and out are fp32 and contiguous."""
        keep: list[Any] = []
        args = _attention_args(spec, keep)
        function, address = self._attention, ctypes.addressof(args)

        def call(
            qkv: torch.Tensor,
            out: torch.Tensor,
            pages: torch.Tensor,
            table: torch.Tensor,
            slots: torch.Tensor,
            positions: torch.Tensor,
            rows: int,
        ) -> None:
            args.qkv, args.out, args.pages = qkv.data_ptr(), out.data_ptr(), pages.data_ptr()
            args.table, args.slots, args.positions = table.data_ptr(), slots.data_ptr(), positions.data_ptr()
            args.n = rows
            args.page_tokens, args.table_width, args.dtype = pages.shape[3], table.stride(0), WEIGHT_DTYPES[pages.dtype]
            function(address)

        call.keep = (keep, args)  # type: ignore[attr-defined]
        return call

    def stack(self, layers: list[LayerSpec]) -> StackCall:
        """See `Backend`; hidden is fp32 and contiguous. One parallel region runs all layers."""
        keep: list[Any] = []
        made = (LayerArgs * len(layers))()
        for args, layer in zip(made, layers, strict=True):
            for name in ("qkv", "out", "mlp_in", "mlp_out"):
                setattr(args, name, self._linear_args(getattr(layer, name), keep))
            args.attention = _attention_args(layer.attention, keep)
            args.qkv.ldx = args.out.ldy = args.mlp_in.ldx = args.mlp_out.ldy = args.qkv.k
            args.qkv.ldy, args.out.ldx = args.qkv.n, args.out.k
            args.mlp_in.ldy = args.mlp_out.ldx = args.mlp_in.n
        return _NativeStack(self._stack, made, keep)

    def _linear_args(self, spec: LinearSpec, keep: list[Any]) -> LinearArgs:
        weight = spec.weight
        vectors = [None if t is None else t.detach().float().contiguous() for t in (spec.bias, spec.gamma, spec.beta)]
        bias, gamma, beta = (None if t is None else t.data_ptr() for t in vectors)
        keep += [weight, *vectors]
        if isinstance(weight, QuantizedWeight):
            codes, scales, kind = weight.codes, weight.scales.data_ptr(), _QUANTIZED[weight.kind]
        else:
            codes, scales, kind = weight, None, WEIGHT_DTYPES[weight.dtype]
        return LinearArgs(
            w=codes.data_ptr(), scales=scales, bias=bias, gamma=gamma, beta=beta, n=weight.shape[0], k=weight.shape[1],
            ldw=codes.shape[1] * codes.element_size(), dtype=kind, prologue=_PROLOGUES[spec.prologue],
            activation=_ACTIVATIONS[spec.activation], eps=spec.eps, round=self._round,
        )  # fmt: skip


class _NativeStack:
    """The call of a stack, its buffers, and the arguments whose addresses the C++ side holds."""

    def __init__(self, function: Any, layers: Any, keep: list[Any]) -> None:
        self._function, self._layers, self._keep = function, layers, keep
        self._args = StackArgs(layers=ctypes.addressof(layers), count=len(layers))
        self._address = ctypes.addressof(self._args)
        self._rows = 0

    def __call__(self, given: StackInput) -> None:
        args, pages, table = self._args, given.pages, given.table
        rows = given.hidden.shape[0]
        if rows > self._rows:
            self._allocate(rows)
        counts = array("i", given.counts)
        args.counts = counts.buffer_info()[0]
        args.hidden, args.pages, args.table = given.hidden.data_ptr(), pages.data_ptr(), table.data_ptr()
        args.slots, args.positions = given.slots.data_ptr(), given.positions.data_ptr()
        args.page_tokens, args.page_dtype = pages.shape[3], WEIGHT_DTYPES[pages.dtype]
        args.table_layer, args.table_width = table.stride(0), table.stride(1)
        self._function(self._address)

    def _allocate(self, rows: int) -> None:
        first = self._layers[0]
        qkv, attended, wide = (torch.empty(rows, n) for n in (first.qkv.n, first.out.k, first.mlp_in.n))
        self._buffers = qkv, attended, wide
        self._args.qkv, self._args.attended, self._args.wide = (t.data_ptr() for t in self._buffers)
        self._rows = rows


def _attention_args(spec: AttentionSpec, keep: list[Any]) -> AttentionArgs:
    tensors = (spec.cos, spec.sin, spec.q_gamma, spec.k_gamma)
    made = [None if t is None else t.detach().float().contiguous() for t in tensors]
    keep += made
    cos, sin, q_gamma, k_gamma = (None if t is None else t.data_ptr() for t in made)
    return AttentionArgs(
        cos=cos, sin=sin, q_gamma=q_gamma, k_gamma=k_gamma, heads=spec.heads, kv_heads=spec.kv_heads,
        dim=spec.head_dim, window=spec.window, scale=spec.scale, eps=spec.eps,
    )  # fmt: skip
