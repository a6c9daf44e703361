"""Greedy tokens of rows of logits, by the C++ kernel if it is loaded, else by torch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from skipdecode.engine.kernels.build import load_library
from skipdecode.engine.kernels.native import GreedyArgs

__all__ = ["greedy"]


def greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """The greedy token of each row (the first of equals), and its log-probability.

    Parameters
    ----------
    logits : torch.Tensor
        (rows, vocabulary), fp32.
    """
    if logits.device.type == "cpu" and logits.is_contiguous() and load_library.cache_info().currsize:
        return _native(logits)
    best, index = logits.max(dim=-1)
    return index.tolist(), (best - logits.logsumexp(-1)).tolist()


def _native(logits: Tensor) -> tuple[list[int], list[float]]:
    rows, vocabulary = logits.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    args = GreedyArgs(
        logits=logits.data_ptr(), tokens=tokens.data_ptr(), logprobs=logprobs.data_ptr(), rows=rows,
        vocabulary=vocabulary,
    )  # fmt: skip
    load_library().skipdecode_greedy(ctypes.c_void_p(ctypes.addressof(args)))
    return tokens.tolist(), logprobs.tolist()
