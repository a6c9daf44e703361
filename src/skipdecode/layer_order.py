"""Orders in which layers are dropped. Pure Python; each keeps the warm-up layers, and all but `top_down` the last layer."""

from __future__ import annotations

__all__ = ["bottom_up", "evenly_spaced", "top_down"]


def bottom_up(num_layers: int, warmup_layers: int) -> tuple[int, ...]:
    """warm-up, warm-up + 1, … (SkipDecode, arXiv 2307.02628, section 3)."""
    return tuple(range(warmup_layers, num_layers - 1))


def top_down(num_layers: int, warmup_layers: int) -> tuple[int, ...]:
    """Last, last - 1, … (early termination). With no warm-up layers, layer 0 stays: one layer must run."""
    return tuple(range(num_layers - 1, max(warmup_layers, 1) - 1, -1))


def evenly_spaced(num_layers: int, least_budget: int, warmup_layers: int) -> tuple[int, ...]:
    """Every prefix is spread out, and dropping down to `least_budget` layers leaves them evenly spaced.

    Source: Unified Layer Skipping, arXiv 2404.06954. The full list goes on below `least_budget` with the layers left.
    """
    free = least_budget - warmup_layers
    kept = set(range(warmup_layers)) | {num_layers - 1}
    if free > 0:
        start = warmup_layers - 1 if warmup_layers else 0
        steps = free if warmup_layers else max(free - 1, 1)
        kept |= {
            start + round(j * (num_layers - 1 - start) / steps) for j in range(0 if free > 1 else steps, steps + 1)
        }
    inner = range(warmup_layers, num_layers - 1)
    first = [layer for layer in inner if layer not in kept]
    rest = [layer for layer in inner if layer in kept]
    return tuple(_spread(first) + _spread(rest))


def _spread(items: list[int]) -> list[int]:
    """Items in bit-reversed order of their rank, so that every prefix is spread over the whole range."""
    bits = max(len(items) - 1, 0).bit_length()
    ranks = (int(format(i, f"0{bits}b")[::-1], 2) if bits else 0 for i in range(2**bits))
    return [items[r] for r in ranks if r < len(items)]
