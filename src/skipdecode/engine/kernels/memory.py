"""Memory in huge pages, if the system has them, for tensors that are read often.

Huge pages need fewer address translations, and hardware prefetchers stop at the end of a page. Linux gives huge pages
to programs that ask for them before the memory is first written.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_LEAST = 2**22  # smaller tensors do not profit
_ALIGN = 4096


def huge_pages(tensor: Tensor) -> Tensor:
    """Ask for huge pages for a new tensor that was not written yet; returns the tensor. Without support, a no-op."""
    if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST and sys.platform == "linux":
        begin = -(-tensor.data_ptr() // _ALIGN) * _ALIGN
        length = (tensor.data_ptr() + tensor.nbytes - begin) // _ALIGN * _ALIGN
        # A refusal (a kernel without huge pages) changes nothing.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)
    return tensor


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
