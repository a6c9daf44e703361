"""Samples from all over a list, without chance."""

from __future__ import annotations

from itertools import islice


def spread_over(count: int, wanted: int) -> list[int]:
    """The first `wanted` of `count` indices in bit-reversed order, in which every prefix is from all over the list.

    So a smaller sample is the beginning of a larger one, and a sample that is cut short is still spread.
    """
    bits = max(count - 1, 0).bit_length()
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))
    return list(islice((index for index in reversed_bits if index < count), wanted))
