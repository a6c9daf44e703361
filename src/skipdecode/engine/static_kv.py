"""Whole rows in a static KV cache: each has room for all its tokens in all layers, at a place.

A step covers a power of two of places. When rows have left and a smaller power would do, the rows behind it move into
free places before it, so the tail of a wave costs what is alive.
"""

from __future__ import annotations

from collections.abc import Iterable

from skipdecode.engine.kernels.static_cache import GRANULE, StaticCache, row_bucket
from skipdecode.engine.kv import KV

__all__ = ["StaticKV"]


class StaticKV(KV):
    """The rows in a static cache that is in no other use."""

    page_tokens = GRANULE

    def __init__(self, cache: StaticCache) -> None:
        self.cache = cache
        self._place: dict[int, int] = {}
        self._opened = 0

    @property
    def token_bytes(self) -> int:
        return self.cache.token_bytes

    @property
    def bytes_held(self) -> int:
        """Bytes of the places in use: whole rows, all layers."""
        return len(self._place) * self.cache.kv.shape[0] * self.cache.capacity * self.token_bytes

    def reserve(self, slots: int, tokens: int, pages: int, most_pages: int | None = None) -> None:
        self.cache.ensure(slots, tokens)

    def fill(self) -> None:
        self.cache.kv.zero_()

    def open(self) -> int:
        """A free slot (see `reserve`): a number that stays while the row's place may change."""
        slot, self._opened = self._opened, self._opened + 1
        self._place[slot] = self._free(1)[0]
        self.cache.wipe(self._place[slot])
        return slot

    def extend(self, slot: int, layers: Iterable[int], tokens: int) -> None:
        """Does nothing: a place has room for all its tokens."""

    def drop(self, slot: int, layers: Iterable[int]) -> None:
        """Does nothing: a place keeps all layers."""

    def close(self, slot: int) -> None:
        del self._place[slot]

    def places(self, slots: Iterable[int]) -> list[int]:
        """Where rows are now."""
        return [self._place[slot] for slot in slots]

    def close_ranks(self) -> int:
        """Move all rows into the first places, a power of two of them; returns how many those are."""
        rows = row_bucket(len(self._place))
        behind = [slot for slot, place in self._place.items() if place >= rows]
        for slot, place in zip(behind, self._free(len(behind)), strict=True):
            self.cache.move(self._place[slot], place)
            self._place[slot] = place
        return rows

    def _free(self, count: int) -> list[int]:
        """The first free places."""
        used = set(self._place.values())
        return [place for place in range(self.cache.places) if place not in used][:count]
