"""Memory that the kernels read: huge pages, if the system has them, and weights quantised to 8 bits.

Huge pages need fewer address translations, and hardware prefetchers stop at the end of a page. Linux gives huge pages
to programs that ask for them before the memory is first written.

int8: each output row has one fp32 scale. A weight is its integer (-127 to 127) times the scale.

w8a8: the integers and scales of int8, in the order in which a CPU multiplies bytes by bytes. Activations are rounded to
127ths of the largest in their group of 256 columns, so a row does not depend on its batch.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from skipdecode.errors import UnfitModelError

Quantization = Literal["int8", "w8a8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "w8a8")

_LEAST_BYTES = 2**22  # smaller tensors do not profit
_ALIGN = 4096
_STEP = 64  # columns that the kernels read at once; rows are padded to a multiple
_BLOCK = 16  # rows of w8a8 in one block, 4 columns of each in turn
_CHUNK = 2**20  # weights quantised at once: bounds the fp32 copies


def huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a new tensor that was not written yet; returns the tensor. Without support, a no-op."""
    if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST_BYTES and sys.platform == "linux":
        begin = -(-tensor.data_ptr() // _ALIGN) * _ALIGN
        length = (tensor.data_ptr() + tensor.nbytes - begin) // _ALIGN * _ALIGN
        # A refusal (a kernel without huge pages) changes nothing.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor


def address(tensor: Tensor, dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor for a kernel that reads this type; raises UnfitModelError if it has another."""
    if tensor.dtype != dtype or tensor.device.type != "cpu":
        raise UnfitModelError(f"a kernel reads {dtype} on the CPU, not {tensor.dtype} on {tensor.device}: report this")
    return tensor.data_ptr()


class Arena:
    """One block of huge pages for tensors of `sizes` bytes, in the order in which they are taken."""

    def __init__(self, sizes: Iterable[int], device: torch.device) -> None:
        self._block = huge_pages(torch.empty(sum(map(_rounded, sizes)), dtype=torch.uint8, device=device))
        self._used = 0

    def take(self, size: int) -> Tensor:
        """The next `size` bytes."""
        begin = self._used
        self._used += _rounded(size)
        return self._block[begin : begin + size]


def _rounded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantised (out, in) matrix."""

    kind: Quantization
    shape: tuple[int, int]  # (out, in)
    # uint8. int8: (out, padded in), two's complement. w8a8: (padded out, padded in), the integers plus 128, in blocks
    # of 16 rows: [4 columns, row, column]. Padding rows and columns have no meaning.
    codes: Tensor
    scales: Tensor  # (out,) fp32

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The (out, in) matrix; the products are rounded."""
        rows, columns = self.shape
        codes = self.codes.view(torch.int8) if self.kind == "int8" else _in_rows(self.codes)
        return (codes[:rows, :columns] * self.scales[:, None]).to(dtype)


_empty_bytes = partial(torch.empty, dtype=torch.uint8)


def quantize(weight: Tensor, kind: Quantization, allocate: Callable[[int], Tensor] = _empty_bytes) -> QuantizedWeight:
    """Quantise a (out, in) matrix, which is not changed; `allocate` gives bytes for codes and scales."""
    (count, columns), (codes, scales) = weight.shape, map(allocate, quantized_sizes(weight.shape, kind))
    quantized = QuantizedWeight(
        kind, (count, columns), codes.view(-1, columns + -columns % _STEP), scales.view(torch.float)
    )
    rows = max(1, _CHUNK // (columns * _BLOCK)) * _BLOCK
    for start in range(0, count, rows):
        part, quantized.scales[start : start + rows] = _int8(weight[start : start + rows].detach().float())
        part = in_blocks(part, _BLOCK) if kind == "w8a8" else part
        quantized.codes[start : start + len(part)] = part
    return quantized


def quantized_sizes(shape: Sequence[int], kind: Quantization) -> tuple[int, int]:
    """Bytes of the codes and of the scales of a matrix."""
    rows = shape[0] + (-shape[0] % _BLOCK if kind == "w8a8" else 0)
    return rows * (shape[1] + -shape[1] % _STEP), 4 * shape[0]


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    codes = torch.round(weight / scale[:, None]).to(torch.int8)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % _STEP))
    return padded.view(torch.uint8).contiguous(), scale


def in_blocks(codes: Tensor, rows: int) -> Tensor:
    """Codes of int8 plus 128 as bytes, in blocks of `rows` rows: [4 columns, row, column]."""
    count, columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -count % rows)) ^ 128
    return padded.view(-1, rows, columns // 4, 4).transpose(1, 2).reshape(-1, columns)


def _in_rows(codes: Tensor) -> Tensor:
    blocks = codes.view(-1, codes.shape[1] // 4, _BLOCK, 4).transpose(1, 2)
    return (blocks.reshape(codes.shape) ^ 128).view(torch.int8)
