"""The C++ kernels. The overhead of a call is about a microsecond.

Activations between operations are fp32. Weights are bf16, fp32, int8 or w8a8; cached keys and values are bf16 or
fp32. For a product, activations of a bf16 model are rounded to bf16 on CPUs that multiply bf16, as in torch, and to 8
bits if the weights are w8a8. The result of a row does not depend, bit for bit, on the other rows of the call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from skipdecode.engine.kernels.library import KernelBuildError, instructions, load_library
from skipdecode.engine.kernels.spec import (
    AttentionSpec,
    FitSpec,
    LayerSpec,
    LinearSpec,
    StackInput,
    check_fit,
    check_input,
    check_layers,
    check_linear,
)
from skipdecode.engine.kernels.weights import QuantizedWeight, address

WEIGHT_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_QUANTIZED = {"int8": 2, "w8a8": 3}
_PROLOGUES = {"none": 0, "rms_norm": 1, "layer_norm": 2, "swiglu": 3, "geglu_tanh": 4}
_ACTIVATIONS = {"none": 0, "relu": 1, "gelu_tanh": 2, "relu_squared": 3, "xielu": 4}
_QUERY_NORMS = {"before": 0, "after": 1, "wide": 2}


# Activations, results, rows, and whether to add to the existing results.
LinearCall = Callable[[torch.Tensor, torch.Tensor, int, bool], None]

# The structures of kernels.h, field by field.
_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class LinearArgs(ctypes.Structure):
    """One linear operation; see kernels.h for its fields."""

    _fields_ = _fields(
        (_POINTER, "x w scales bias gamma beta y"),
        (_INT64, "m n k ldw ldx ldy"),
        (_INT32, "dtype prologue activation accumulate"),
        (_FLOAT, "eps"),
        (_INT32, "round"),
        (_FLOAT * 3, "constants"),
    )


class AttentionArgs(ctypes.Structure):
    """Attention; see kernels.h for its fields."""

    _fields_ = _fields(
        (_POINTER, "qkv out pages table slots positions cos sin q_gamma k_gamma q_scale taps"),
        (_INT64, "n heads kv_heads dim page_tokens table_width window rotated width"),
        (_FLOAT, "scale eps cap"),
        (_INT32, "dtype norm pairs"),
    )


class LayerArgs(ctypes.Structure):
    """A decoder layer; see kernels.h for its fields."""

    _fields_ = _fields(
        (LinearArgs, "qkv out mlp_in mlp_out out_norm mlp_norm"),
        (AttentionArgs, "attention"),
        (LinearArgs, "down up map"),
        (_POINTER, "first"),
    )


_Layers = ctypes.Array[LayerArgs]


class StackArgs(ctypes.Structure):
    """A stack of decoder layers; see kernels.h for its fields."""

    _fields_ = _fields(
        (_POINTER, "layers layer_rows context_rows"),
        (_POINTER, "hidden qkv attended wide features pages table slots positions seconds"),
        (_INT64, "count page_tokens table_width table_layer context_tokens page_size bridged rows"),
        (_INT32, "page_dtype padding"),
    )


class GreedyArgs(ctypes.Structure):
    """The choice of greedy tokens; see greedy.cpp for its fields."""

    _fields_ = _fields((_POINTER, "logits tokens logprobs"), (_INT64, "rows vocabulary"))


class NativeKernels:
    """The kernels, built on first use for this CPU; raises KernelBuildError if that fails.

    In products with int8 weights, activations of an fp32 model (`dtype`) are not rounded, others are rounded to bf16.
    `multiplies_bytes`: this CPU multiplies bytes, which w8a8 weights need (AVX512_VNNI, AVX2 without AVX-512, or ARM's
    dotprod).
    `finds_likeliest`: an 8-bit copy of a head finds the most probable tokens (AVX512_VNNI). `instructions`: what
    products are made with.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        library = load_library()
        self._round = dtype != torch.float32
        self.multiplies_bytes = bool(library.skipdecode_multiplies_bytes())
        self.instructions = instructions(library)
        self.finds_likeliest = hasattr(library, "skipdecode_likeliest")
        self._linear, self._stack = library.skipdecode_linear, library.skipdecode_stack
        for function in (self._linear, self._stack):
            function.argtypes, function.restype = [ctypes.c_void_p], None

    def linear(self, spec: LinearSpec) -> LinearCall:
        """A function that computes `spec`; activations and results are fp32 with contiguous rows."""
        owners: list[object] = []
        args = self.linear_args(spec, owners)
        function, arguments = self._linear, ctypes.addressof(args)

        def call(x: torch.Tensor, out: torch.Tensor, rows: int, accumulate: bool) -> None:
            args.x, args.y, args.m = address(x), address(out), rows
            args.ldx, args.ldy, args.accumulate = x.stride(0), out.stride(0), accumulate
            function(arguments)

        call.owners = (owners, args)  # type: ignore[attr-defined]  # the C++ side holds only their addresses
        return call

    def stack(self, layers: list[LayerSpec], fit: FitSpec | None = None) -> NativeStack:
        """A function that runs layers of one geometry on fp32 hidden states, in one parallel region.

        A `fit` replaces layers that rows skip. Raises UnfitModelError or FitError for sizes that do not fit together.
        """
        check_layers(layers)
        owners: list[object] = []
        arguments = (LayerArgs * len(layers))()
        for args, layer in zip(arguments, layers, strict=True):
            for name in ("qkv", "out", "mlp_in", "mlp_out"):
                setattr(args, name, self.linear_args(getattr(layer, name), owners))
            for name, gamma in (("out_norm", layer.out_gamma), ("mlp_norm", layer.mlp_gamma)):
                if gamma is not None:
                    setattr(args, name, _norm_args(gamma, layer.eps, owners))
            args.attention = _attention_args(layer.attention, owners)
            args.qkv.ldx = args.out.ldy = args.mlp_in.ldx = args.mlp_out.ldy = args.qkv.k
            args.qkv.ldy, args.out.ldx = args.qkv.n, args.out.k
            args.mlp_in.ldy = args.mlp_out.ldx = args.mlp_in.n
        if fit is not None:
            check_fit(fit, layers)
            self._add_fit(arguments, fit, owners)
        return NativeStack(self._stack, arguments, owners, 0 if fit is None else fit.context_tokens)

    def _add_fit(self, layers: _Layers, fit: FitSpec, owners: list[object]) -> None:
        for index, (down, up) in fit.bridges.items():
            args = layers[index]
            args.down, args.up = self.linear_args(down, owners), self.linear_args(up, owners)
            args.down.ldx = args.up.ldy = args.qkv.k
            args.down.ldy = args.up.ldx = args.down.n
        for index, linear in fit.maps.items():
            args = layers[index]
            args.map = self.linear_args(linear, owners)
            args.map.eps, args.map.ldx, args.map.ldy = linear.eps, args.map.k, args.qkv.n
            (args.first,) = _addresses((fit.first[index],), owners)

    def linear_args(self, spec: LinearSpec, owners: list[object]) -> LinearArgs:
        """`spec` as a C structure; `owners` gets the tensors that it points to."""
        check_linear(spec)
        weight = spec.weight
        bias, gamma, beta = _addresses((spec.bias, spec.gamma, spec.beta), owners)
        owners.append(weight)
        if isinstance(weight, QuantizedWeight):
            codes, scales, kind = weight.codes, address(weight.scales), _QUANTIZED[weight.kind]
        else:
            codes, scales, kind = weight, None, WEIGHT_DTYPES[weight.dtype]
        return LinearArgs(
            w=codes.data_ptr(), scales=scales, bias=bias, gamma=gamma, beta=beta, n=weight.shape[0], k=weight.shape[1],
            ldw=codes.shape[1] * codes.element_size(), dtype=kind, prologue=_PROLOGUES[spec.prologue],
            activation=_ACTIVATIONS[spec.activation], eps=spec.eps, round=self._round, constants=spec.constants,
        )  # fmt: skip


_ROWS_AT_ONCE = 64
"""The number of rows by which the buffers of a stack grow."""


class NativeStack:
    """A stack of layers as a callable, with its buffers and the arguments whose addresses the C++ code holds."""

    def __init__(
        self, function: Callable[[int], None], layers: _Layers, owners: list[object], context_tokens: int
    ) -> None:
        self._function, self._layers, self._owners = function, layers, owners
        self._attention = next(layer.attention for layer in layers if not layer.attention.taps)
        self._args = StackArgs(layers=ctypes.addressof(layers), count=len(layers), context_tokens=context_tokens)
        self._address = ctypes.addressof(self._args)
        self._rows = 0
        self._buffers: tuple[torch.Tensor, ...] = ()

    def __call__(self, inputs: StackInput) -> None:
        args, pages, table = self._args, inputs.pages, inputs.table
        rows, attention = inputs.hidden.shape[0], self._attention
        check_input(inputs, args.count, self._layers[0].qkv.k, attention.kv_heads, attention.dim, args.context_tokens)
        if rows > self._rows:
            self._allocate(rows)
        layer_rows = array("i", chain.from_iterable(inputs.layers))
        args.layer_rows, args.bridged, args.rows = layer_rows.buffer_info()[0], inputs.bridged, rows
        args.context_rows = None if inputs.context_rows is None else address(inputs.context_rows, torch.int32)
        args.hidden, args.pages, args.table = address(inputs.hidden), pages.data_ptr(), address(table, torch.int32)
        args.slots, args.positions = address(inputs.slots, torch.int32), address(inputs.positions, torch.int32)
        args.page_tokens, args.page_dtype = pages.shape[3], WEIGHT_DTYPES[pages.dtype]
        args.page_size = pages.stride(0)
        args.table_layer, args.table_width = table.stride(0), table.stride(1)
        self._function(self._address)

    def _allocate(self, rows: int) -> None:
        # Forwards with prompts differ by a few rows. The old buffers are freed before new ones are allocated.
        self._buffers, rows = (), -(-rows // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
        first = self._layers[0]
        # If sublayer outputs are normed, they use the memory of queries, keys and values.
        wide = max(first.mlp_in.n, *(layer.down.n for layer in self._layers))
        features = max(layer.map.k for layer in self._layers) if self._args.context_tokens else 0
        widths = max(first.out.n, *(layer.qkv.n for layer in self._layers)), first.out.k, wide, features
        self._buffers = tuple(torch.empty(rows, n, dtype=torch.float32) for n in widths)
        addresses = map(address, self._buffers)
        self._args.qkv, self._args.attended, self._args.wide, self._args.features = addresses
        self._rows = rows


def _addresses(tensors: Iterable[torch.Tensor | None], owners: list[object]) -> list[int | None]:
    """The addresses of tensors as fp32 vectors, which `owners` gets."""
    vectors = [None if t is None else t.detach().float().contiguous() for t in tensors]
    owners += vectors
    return [None if t is None else address(t) for t in vectors]


def _norm_args(gamma: torch.Tensor, eps: float, owners: list[object]) -> LinearArgs:
    (at,) = _addresses((gamma,), owners)
    return LinearArgs(gamma=at, k=len(gamma), ldx=len(gamma), ldy=len(gamma), prologue=1, eps=eps)


def _attention_args(spec: AttentionSpec, owners: list[object]) -> AttentionArgs:
    tensors = (spec.cos, spec.sin, spec.q_gamma, spec.k_gamma, spec.q_scale, spec.taps)
    cos, sin, q_gamma, k_gamma, q_scale, taps = _addresses(tensors, owners)
    return AttentionArgs(
        cos=cos, sin=sin, q_gamma=q_gamma, k_gamma=k_gamma, q_scale=q_scale, taps=taps, heads=spec.heads,
        kv_heads=spec.kv_heads, dim=spec.head_dim, width=len(spec.taps) - 1 if spec.taps is not None else 0,
        window=spec.window, rotated=0 if spec.cos is None else 2 * spec.cos.shape[1], scale=spec.scale, eps=spec.eps,
        cap=spec.cap, norm=_QUERY_NORMS[spec.norm], pairs=spec.pairs,
    )  # fmt: skip


def greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """The greedy token of each row (the first of equals), and its log-probability.

    `logits`: (rows, vocabulary), fp32.
    """
    if not (logits.device.type == "cpu" and logits.is_contiguous() and load_library.cache_info().currsize):
        best, index = logits.max(dim=-1)
        return index.tolist(), (best - logits.logsumexp(-1)).tolist()
    rows, vocabulary = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
    args = GreedyArgs(
        logits=address(logits), tokens=tokens.data_ptr(), logprobs=logprobs.data_ptr(), rows=rows,
        vocabulary=vocabulary,
    )  # fmt: skip
    load_library().skipdecode_greedy(ctypes.c_void_p(ctypes.addressof(args)))
    return tokens.tolist(), logprobs.tolist()


def native_kernels(device: torch.device, dtype: torch.dtype) -> tuple[NativeKernels | None, str]:
    """The C++ kernels for a dtype and a device, or None and the reason why they cannot be used."""
    if device.type != "cpu":
        return None, f"the fast engine runs on CPUs, and the model is on {device.type}"
    if dtype not in WEIGHT_DTYPES:
        name = str(dtype).removeprefix("torch.")
        return None, f"the fast engine reads bfloat16 and float32 weights, and the model has {name}"
    try:
        return NativeKernels(dtype), ""
    except KernelBuildError as error:
        return None, str(error)
