"""Whole rows in a static KV cache: each has room for all its tokens in all layers, at a place.

A step covers a power of two of places. When rows have left and a smaller power would do, the rows behind it move into
free places before it, so the tail of a wave costs what is alive.
"""

from __future__ import annotations

from collections.abc import Iterable

from skipdecode.engine.kernels.static_cache import GRANULE, StaticCache, row_bucket

__all__ = ["StaticKV"]


class StaticKV:
    """The rows in a static cache; see `skipdecode.engine.kv.KV`.

    Parameters
    ----------
    cache : StaticCache
        In no other use.

    Attributes
    ----------
    page_tokens : int
        Room is counted in stretches of this many tokens of one layer of one row.
    """

    page_tokens = GRANULE

    def __init__(self, cache: StaticCache) -> None:
        self.cache = cache
        self._place: dict[int, int] = {}
        self._opened = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return self.cache.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a stretch."""
        return self.token_bytes * self.page_tokens

    @property
    def bytes_held(self) -> int:
        """Bytes of the places in use: whole rows, all layers."""
        return len(self._place) * self.cache.kv.shape[0] * self.cache.capacity * self.token_bytes

    def pages_for(self, tokens: int) -> int:
        """Stretches that hold `tokens` tokens of one layer."""
        return -(-tokens // self.page_tokens)

    def reserve(self, slots: int, tokens: int, pages: int) -> None:
        """Make room for `slots` rows of up to `tokens` tokens; keeps what is held."""
        self.cache.ensure(slots, tokens)

    def fill(self) -> None:
        """Write zeros everywhere, for measurements."""
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
        """Give back a row's place."""
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
