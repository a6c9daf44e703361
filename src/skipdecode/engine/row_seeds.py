"""The seed of a row's sampling: from the run's seed and the row's key, so that it depends on no batch."""

from __future__ import annotations

import hashlib

__all__ = ["row_seed"]


def row_seed(seed: int, key: int) -> int:
    """A seed of 63 bits."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
