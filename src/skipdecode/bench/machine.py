"""What the machine at hand reaches: bytes a second of a large read, operations a second of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from skipdecode.cost import Machine

__all__ = ["measure_bandwidth", "measure_flops", "measure_machine", "synchronize"]

# Several times the largest last-level cache, and small enough for any machine that holds a model.
_READ_BYTES = {"cpu": 2**29, "cuda": 2**31}
_REPEATS = 3


def measure_machine(device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Machine:
    """Bandwidth and matrix-product rate of a device, for `CostModel.predicted`. Takes less than a second.

    On a CPU the rate is that of fp32, whatever `dtype`: good kernels multiply bf16 weights as fp32, while a CPU without
    bf16 instructions runs torch's bf16 product many times slower than it needs to.
    """
    on_cpu = torch.device(device).type == "cpu"
    return Machine(measure_bandwidth(device), measure_flops(torch.float32 if on_cpu else dtype, device))


def measure_bandwidth(device: torch.device | str = "cpu") -> float:
    """Bytes a second of a large read: the best of a few sums over half a GiB (on a GPU 2 GiB), on all threads."""
    device = torch.device(device)
    block = torch.ones(_READ_BYTES.get(device.type, 2**29) // 4, device=device)
    size = block.numel() * block.element_size()
    fastest = min(_best_seconds(lambda: block.sum(), device), _best_seconds(lambda: torch.dot(block, block), device))
    return size / fastest


def measure_flops(dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> float:
    """Operations a second of a matrix product in `dtype`: the best of a few, large enough to be bound by arithmetic."""
    device = torch.device(device)
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _best_seconds(lambda: left @ right, device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given; does nothing on a CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for attempt in range(_REPEATS + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if attempt:  # The first one warms up.
            best = min(best, time.perf_counter() - start)
    return best
