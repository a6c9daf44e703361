"""How the C library hands back freed memory. No torch here."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["keep_freed_memory", "return_freed_memory"]

# malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell malloc to keep freed memory for the process instead of returning it to the kernel.

    By default every large tensor is mapped anew and its pages are faulted in and zeroed on each use. Measured on two
    cores, all weights of SmolLM2-135M tuned in bf16: 452 tokens/s with freed memory kept, 246 without. The process then
    holds all that it ever had, and more with every gap between pieces: call `return_freed_memory` from time to time.

    Returns
    -------
    bool
        Whether it was done; other C libraries than GNU's are left alone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def return_freed_memory() -> None:
    """Give the kernel the freed pages that malloc kept between others; nothing with C libraries but GNU's."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
