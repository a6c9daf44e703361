"""The prefix cache: pages of prompts that later sequences with the same beginning share.

A *block* has one page of each layer that a prompt runs: the keys and values of a full page of its tokens. The key of a
block is the layers, the request's `cache_salt`, the preceding block (which stands for all earlier tokens), and its own
tokens. Keys are compared, not only hashed. Sequences only read a shared page, because they write behind the full pages
of the prompt. Pages of generated tokens are never cached, because layers that these tokens skipped hold nothing of
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from skipdecode.engine.kv import PagedKV
from skipdecode.engine.sequence import PromptLayers

PREFIX_BYTES = 1 << 30
"""Maximum bytes of cached prompts that no sequence uses."""

_Key = tuple[Any, tuple[int, ...]]  # the block in front, or of the first block the layers and the salt; its tokens


class _Block:
    """A page of each layer with the same tokens, and the number of sequences that use each page."""

    def __init__(self, key: _Key, pages: dict[int, int]) -> None:
        self.key, self.pages = key, pages
        self.rows = 0
        self.users = dict.fromkeys(pages, 0)
        self.idle = len(pages)  # pages that no row uses
        self.cached = True  # later sequences can share it

    def use(self) -> int:
        """Add a sequence; returns the number of pages that were idle."""
        idle, self.idle = self.idle, 0
        self.rows += 1
        for layer in self.users:
            self.users[layer] += 1
        return idle


class PrefixKV(PagedKV):
    """Pages with a cache of full prompt pages; see the module.

    The least recently used blocks are evicted if pages are needed, or if idle blocks take more than `most_bytes`.
    """

    def __init__(self, *geometry: Any, most_bytes: int = PREFIX_BYTES) -> None:
        super().__init__(*geometry)
        self._most_idle = most_bytes // self.layout.page_bytes
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()  # least recently used first
        self._shared: dict[int, list[_Block]] = {}  # by slot: those of its first pages
        self._salts: dict[int, str] = {}  # by slot
        self._idle = 0

    @property
    def pages_held(self) -> int:
        """Pages that sequences use; a shared page counts once."""
        return super().pages_held - self._idle

    @property
    def cached_bytes(self) -> int:
        return self._idle * self.layout.page_bytes

    def open(self, cache_salt: str = "") -> int:
        slot = super().open()
        self._shared[slot] = []
        self._salts[slot] = cache_salt
        return slot

    def match(self, slot: int, layers: PromptLayers, prompt: tuple[int, ...], fed: int) -> int:
        mine, size = self._shared[slot], self.layout.page_tokens
        shared = False
        while fed == len(mine) * size and fed + size < len(prompt):
            block = self._blocks.get(_key(mine, (layers, self._salts[slot]), prompt, fed, size))
            if block is None:
                break
            self._share(slot, block)
            fed += size
            shared = True
        if shared:
            self._touch(mine)
        return fed

    def keep(self, slot: int, layers: PromptLayers, prompt: tuple[int, ...], fed: int) -> None:
        mine, held, size = self._shared[slot], self._held[slot], self.layout.page_tokens
        before = len(mine)
        for index in range(before, min(fed, len(prompt)) // size):
            key = _key(mine, (layers, self._salts[slot]), prompt, index * size, size)
            own = {layer: held[layer][index] for layer in layers.held}
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(key, own)
                self._idle += block.idle
            else:
                # Another row was first: the same numbers, held once.
                self._free.extend(own.values())
            self._share(slot, block)
        if len(mine) > before:
            self._touch(mine)

    def drop(self, slot: int, layers: Iterable[int]) -> None:
        held, mine = self._held[slot], self._shared[slot]
        for layer in layers:
            if not held[layer]:
                continue
            for block in mine:
                block.users[layer] -= 1
                if not block.users[layer]:
                    self._release(block, layer)
            self._free.extend(reversed(held[layer][len(mine) :]))
            held[layer] = []
        while self._idle > self._most_idle:
            self._evict()

    def close(self, slot: int) -> None:
        super().close(slot)
        del self._salts[slot]
        for block in self._shared.pop(slot):
            block.rows -= 1
            self.overlap -= block.rows > 0

    def _take(self) -> int:
        if not self._free:  # Layers that only the prompt of a running sequence ran left their pages in the cache.
            self._evict()
        return super()._take()

    def _share(self, slot: int, block: _Block) -> None:
        """Make a block the next pages of a sequence, in index of its own pages if it has them."""
        index = len(self._shared[slot])
        for layer, page in block.pages.items():
            self._held[slot][layer][index : index + 1] = [page]
            self.table[layer, slot, index] = page
        self._idle -= block.use()
        self.overlap += block.rows > 1
        self._shared[slot].append(block)

    def _touch(self, blocks: list[_Block]) -> None:
        """Record a use, the first block last: later blocks cannot be found without it, so they are evicted earlier."""
        for block in reversed(blocks):
            if block.cached:
                self._blocks.move_to_end(block.key)

    def _release(self, block: _Block, layer: int) -> None:
        """Return a page that no sequence uses any more."""
        if block.cached:
            block.idle += 1
            self._idle += 1
        else:
            self._free.append(block.pages[layer])

    def _evict(self) -> None:
        """Evict the least recently used block that has idle pages."""
        block = next(block for block in self._blocks.values() if block.idle)
        del self._blocks[block.key]
        block.cached = False
        self._idle -= block.idle
        self._free.extend(page for layer, page in block.pages.items() if not block.users[layer])


def _key(before: list[_Block], first: tuple[PromptLayers, str], prompt: tuple[int, ...], start: int, size: int) -> _Key:
    return (before[-1] if before else first), prompt[start : start + size]
