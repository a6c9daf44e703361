"""The structures of kernels.h, field by field."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["AttentionArgs", "GreedyArgs", "LayerArgs", "LinearArgs", "StackArgs"]

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class LinearArgs(ctypes.Structure):
    """A linear operation."""

    _fields_ = _fields(
        (_POINTER, "x w scales bias gamma beta y"),
        (_INT64, "m n k ldw ldx ldy"),
        (_INT32, "dtype prologue activation accumulate"),
        (_FLOAT, "eps"),
        (_INT32, "round"),
    )


class AttentionArgs(ctypes.Structure):
    """Attention."""

    _fields_ = _fields(
        (_POINTER, "qkv out pages table slots positions cos sin q_gamma k_gamma"),
        (_INT64, "n heads kv_heads dim page_tokens table_width window"),
        (_FLOAT, "scale eps"),
        (_INT32, "dtype padding"),
    )


class LayerArgs(ctypes.Structure):
    """A decoder layer."""

    _fields_ = _fields((LinearArgs, "qkv out mlp_in mlp_out"), (AttentionArgs, "attention"))


class StackArgs(ctypes.Structure):
    """A stack of them."""

    _fields_ = _fields(
        (_POINTER, "layers counts hidden qkv attended wide pages table slots positions seconds"),
        (_INT64, "count page_tokens table_width table_layer"),
        (_INT32, "page_dtype padding"),
    )


class GreedyArgs(ctypes.Structure):
    """The choice of the likeliest tokens; see greedy.cpp."""

    _fields_ = _fields((_POINTER, "logits tokens logprobs"), (_INT64, "rows vocabulary"))
