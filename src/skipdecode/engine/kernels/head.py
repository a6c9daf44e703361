"""The output embedding on the C++ kernels, and exact top tokens from an 8-bit copy of it.

The 8-bit copy gives each token a score, and a bound on the distance of the score from the logit of the full head,
rounding included (docs/theory.md has the derivation). Tokens whose upper bound reaches the best lower bound are
candidates. The full head's own kernel computes their logits, so the top token is that of the full head, bit for bit and
with ties.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skipdecode.engine.kernels.library import load_library
from skipdecode.engine.kernels.native import NativeKernels
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.kernels.weights import QuantizedWeight, address, huge_pages, in_blocks, quantize

MOST_ROWS = 32
"""Maximum rows of a forward for which the copy is used; with more rows the full head is as fast."""
MOST_CANDIDATES = 2048
"""Maximum candidates of a row; with more the row takes the full head."""
_GROUP, _STEP = 64, 64  # tokens and columns that the kernel processes at once
_CHUNK = 2**16  # weights converted at once: bounds the fp32 copies
_LARGEST = 1e12  # maximum norm of a row; above it the kernel's bound may overflow
_POINTERS = "head codes scales errors norms bias tops best token_ids logits counts"


class _Args(ctypes.Structure):
    """See head.cpp."""

    _fields_ = [*((name, ctypes.c_void_p) for name in _POINTERS.split()), ("most", ctypes.c_int64)]


class Candidates(NamedTuple):
    """The top token of each row (the first of equals), and the candidates with their logits.

    `token_ids`: int64 of shape (rows, MOST_CANDIDATES); the first `counts` of each row are valid, ascending.
    `logits` are those of the full head, fp32 of the same shape. `size` is that of the vocabulary, and `full` gives the
    logits of all tokens of a row.
    """

    best: list[int]
    token_ids: Tensor
    logits: Tensor
    counts: list[int]
    size: int
    full: Callable[[int], Tensor] = lambda row: torch.empty(0)


class ShortHead:
    """The 8-bit copy of an output embedding and its bounds.

    `spec`: a head whose weight is bf16 or fp32, with nothing after the product but a bias.

    Attributes `bounded`: whether the bounds hold: not for weights that are not finite or above 10^12. `nbytes` and
    `version`: bytes of the copy, which a step reads; see `_version`.
    """

    def __init__(self, kernels: NativeKernels, spec: LinearSpec) -> None:
        weight: Any = spec.weight
        self._owners: list[object] = []
        self._full = kernels.linear_args(spec, self._owners)
        self._call = load_library().skipdecode_likeliest
        self.version, (size, columns) = _version(weight), weight.shape
        self._size = size
        groups, padded = -(-size // _GROUP), -(-columns // _STEP) * _STEP
        self._codes = huge_pages(torch.empty(groups, padded // 4, _GROUP, 4, dtype=torch.uint8))
        self._numbers = torch.zeros(4, groups * _GROUP, dtype=torch.float32)
        rows = max(1, _CHUNK // (columns * _GROUP)) * _GROUP
        for start in range(0, size, rows):
            self._copy(weight[start : start + rows].detach(), start)
        scales, errors, norms, bias = self._numbers
        if spec.bias is not None:
            bias[:size] = spec.bias
        self.bounded = bool(errors.isfinite().all() and norms.max() < _LARGEST and bias.abs().max() < _LARGEST)
        self.nbytes = self._codes.nbytes + self._numbers.nbytes
        self._args = _Args(
            head=ctypes.addressof(self._full), codes=self._codes.data_ptr(), scales=address(scales),
            errors=address(errors), norms=address(norms), bias=None if spec.bias is None else address(bias),
            most=MOST_CANDIDATES,
        )  # fmt: skip

    def __call__(self, hidden: Tensor, tops: list[int]) -> Candidates | None:
        """The candidates for the top `tops` tokens of each row; None if a row has more than `MOST_CANDIDATES`.

        `hidden` are the states before the head's norm, (rows, hidden) in fp32.
        """
        rows, full, args = len(tops), self._full, self._args
        wanted, results = torch.tensor(tops, dtype=torch.int32), torch.empty(2, rows, dtype=torch.int64)
        token_ids = torch.empty(rows, MOST_CANDIDATES, dtype=torch.int64)
        logits = torch.empty(rows, MOST_CANDIDATES, dtype=torch.float32)
        full.x, full.m, full.ldx = address(hidden), rows, hidden.stride(0)
        args.tops, args.best, args.counts = (t.data_ptr() for t in (wanted, *results))
        args.token_ids, args.logits = token_ids.data_ptr(), address(logits)
        self._call(ctypes.c_void_p(ctypes.addressof(args)))
        best, counts = results.tolist()
        return None if min(counts) < 0 else Candidates(best, token_ids, logits, counts, self._size)

    def _copy(self, part: Tensor, start: int) -> None:
        """Codes and bounds of the tokens from `start` on; the bounds are enlarged by their own rounding errors."""
        count, columns = part.shape
        quantized, part = quantize(part, "int8"), part.float()
        groups = in_blocks(quantized.codes, _GROUP).view(-1, *self._codes.shape[1:])
        self._codes[start // _GROUP : start // _GROUP + len(groups)] = groups
        unit = 2.0**-24
        # The error of sums of squares in fp32, and squares that underflow.
        up, least = 1 + 4 * columns * unit, math.sqrt(columns) * 2.0**-62
        norm = part.norm(dim=1) * up + least
        error = (part - quantized.dequantize()).norm(dim=1) * up + least
        # The error of the full head's products and sums in any order, and of the difference above.
        error += norm * ((2 * columns + 16) * unit * 1.01 + 8 * unit)
        for row, values in zip(self._numbers, (quantized.scales, error, norm + error), strict=False):
            row[start : start + count] = values


def _version(weight: Tensor) -> int:
    """How often a weight was changed in place; torch does not count changes of inference tensors."""
    return 0 if weight.is_inference() else weight._version


class NativeHead:
    """The head of a model on the C++ kernels.

    For up to 32 rows that need a few top tokens only (greedy, top-k), the head first uses an 8-bit copy of its weight.
    If that leaves too many candidates, the head uses the weight. The copy is made at first use, for weights of 8 MiB or
    more on a CPU with AVX512_VNNI. It adds half of the weight's memory (a quarter in fp32). It is
    made again after the weight was changed.

    Attributes `short_from`: minimum bytes of a weight for a copy; infinity: never. `fell_back`: whether the last call
    used the copy and then the weight.
    """

    short_from: float = 2**23

    def __init__(self, kernels: NativeKernels, spec: LinearSpec) -> None:
        self._kernels, self._spec = kernels, spec
        self._linear = kernels.linear(spec)
        self._logits = torch.empty(0, spec.weight.shape[0], dtype=torch.float32)
        self._short: ShortHead | None = None
        plain = not isinstance(spec.weight, QuantizedWeight) and spec.activation == "none"
        self._can = plain and kernels.finds_likeliest and spec.weight.shape[1] <= 2**15
        self.fell_back = False

    @property
    def short(self) -> ShortHead | None:
        """The 8-bit copy, made at first use; None if it is not used for this weight or CPU."""
        weight: Any = self._spec.weight
        if not self._can or weight.nbytes < self.short_from:
            return None
        if self._short is None or self._short.version != _version(weight):
            self._short = None  # frees its memory before the next copy is made
            self._short = ShortHead(self._kernels, self._spec)
        return self._short if self._short.bounded else None

    def __call__(self, hidden: Tensor, tops: list[int] | None = None) -> Tensor | Candidates:
        """Logits (rows, vocabulary) of the states before the norm, valid until the next call.

        `tops` has for each row the number of top tokens that are enough; the result may then be `Candidates`.
        """
        rows, vocabulary = len(hidden), self._logits.shape[1]
        if rows > len(self._logits):
            self._logits = torch.empty(rows, vocabulary, dtype=torch.float32)
        self.fell_back = False
        if tops and rows <= MOST_ROWS and (short := self.short) is not None:
            candidates = short(hidden, [min(top, vocabulary) for top in tops])
            if candidates is not None:
                return candidates._replace(full=partial(self._full_row, hidden))
            self.fell_back = True
        if rows:
            self._linear(hidden, self._logits, rows, False)
        return self._logits[:rows]

    def _full_row(self, hidden: Tensor, row: int) -> Tensor:
        logits = torch.empty(1, self._logits.shape[1], dtype=torch.float32)
        self._linear(hidden[row : row + 1], logits, 1, False)
        return logits[0]
