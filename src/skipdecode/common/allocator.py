"""Settings of the C library for freed memory. No torch."""

from __future__ import annotations

import ctypes
import platform

# malloc.h of the GNU C library.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Make malloc keep freed memory for the process in place of returning it to the kernel.

    By default, each large tensor is mapped again, and its pages are faulted in and zeroed at each use. Measured on two
    cores, tuning all weights of SmolLM2-135M in bf16: 452 tokens/s with this setting, 246 without. The memory of the
    process then never shrinks, and grows by fragmentation: call `return_freed_memory` from time to time.

    Returns
    -------
    bool
        Whether the setting was changed; only the GNU C library has it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def return_freed_memory() -> None:
    """Return freed pages that malloc kept to the kernel; does nothing with other C libraries than GNU's."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
