"""The C++ kernels behind the `Backend` interface. One call costs about a microsecond on top of its work.

Activations are fp32; weights and cached keys and values are bf16 or fp32. A row's result does not depend, bit for bit,
on the other rows of the call.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from skipdecode.kernels.build import load_library
from skipdecode.kernels.spec import AttentionCall, AttentionSpec, LinearCall, LinearSpec

__all__ = ["WEIGHT_DTYPES", "NativeBackend"]

WEIGHT_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_PROLOGUES = {"none": 0, "rms_norm": 1, "layer_norm": 2, "swiglu": 3, "geglu_tanh": 4}
_ACTIVATIONS = {"none": 0, "relu": 1, "gelu_tanh": 2}
_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(**groups: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups.values() for name in names.split()]


class _LinearArgs(ctypes.Structure):
    _fields_ = _fields(
        a=(_POINTER, "x w bias gamma beta y"),
        b=(_INT64, "m n k ldx ldy"),
        c=(_INT32, "dtype prologue activation accumulate"),
        d=(_FLOAT, "eps"),
        e=(_INT32, "padding"),
    )


class _AttentionArgs(ctypes.Structure):
    _fields_ = _fields(
        a=(_POINTER, "qkv out pages table slots positions cos sin q_gamma k_gamma"),
        b=(_INT64, "n heads kv_heads dim page_tokens table_width window"),
        c=(_FLOAT, "scale eps"),
        d=(_INT32, "dtype padding"),
    )


class NativeBackend:
    """Kernels built on first use for this CPU; raises KernelBuildError where that fails."""

    name = "native"

    def __init__(self) -> None:
        library = load_library()
        self._linear = library.skipdecode_linear
        self._attention = library.skipdecode_attention
        for function in (self._linear, self._attention):
            function.argtypes, function.restype = [ctypes.c_void_p], None

    def activation_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        """Always fp32."""
        return torch.float32

    def linear(self, spec: LinearSpec) -> LinearCall:
        """See `Backend`; x and out are fp32 with contiguous rows."""
        weight = spec.weight
        keep = [None if t is None else t.detach().float().contiguous() for t in (spec.bias, spec.gamma, spec.beta)]
        bias, gamma, beta = (None if t is None else t.data_ptr() for t in keep)
        args = _LinearArgs(
            w=weight.data_ptr(), bias=bias, gamma=gamma, beta=beta, n=weight.shape[0], k=weight.shape[1],
            dtype=WEIGHT_DTYPES[weight.dtype], prologue=_PROLOGUES[spec.prologue],
            activation=_ACTIVATIONS[spec.activation], eps=spec.eps,
        )  # fmt: skip
        function, address = self._linear, ctypes.addressof(args)

        def call(x: torch.Tensor, out: torch.Tensor, rows: int, accumulate: bool) -> None:
            args.x, args.y, args.m = x.data_ptr(), out.data_ptr(), rows
            args.ldx, args.ldy, args.accumulate = x.stride(0), out.stride(0), accumulate
            function(address)

        call.keep = (weight, keep, args)  # type: ignore[attr-defined]  # the C++ side holds only their addresses
        return call

    def attention(self, spec: AttentionSpec) -> AttentionCall:
        """See `Backend`; qkv and out are fp32 and contiguous."""
        tensors = (spec.cos, spec.sin, spec.q_gamma, spec.k_gamma)
        keep = [None if t is None else t.detach().float().contiguous() for t in tensors]
        cos, sin, q_gamma, k_gamma = (None if t is None else t.data_ptr() for t in keep)
        args = _AttentionArgs(
            cos=cos, sin=sin, q_gamma=q_gamma, k_gamma=k_gamma, heads=spec.heads, kv_heads=spec.kv_heads,
            dim=spec.head_dim, window=spec.window, scale=spec.scale, eps=spec.eps,
        )  # fmt: skip
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
