"""Keys and values in pages. A sequence holds the pages that it needs in each layer, and nothing is copied.

A page is `page_tokens` tokens of one layer of one sequence. Skipped layers have no pages. A layer that a sequence will
never run again returns its pages, and so does a finished sequence. The bytes held are therefore at most the sum of
active tokens x layers, plus less than one page per sequence and active layer.

The prefix cache: pages of prompts that later sequences with the same beginning share. A *block* has one page of each
layer that a prompt runs: the keys and values of a full page of its tokens. The key of a block is the layers, the
request's `cache_salt`, the preceding block (which stands for all earlier tokens), and its own tokens. Keys are
compared, not only hashed. Sequences only read a shared page, because they write behind the full pages of the prompt.
Pages of generated tokens are never cached, because layers that these tokens skipped hold nothing of them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from skipdecode.engine.kernels.weights import huge_pages
from skipdecode.engine.sequence import Sequence

PAGE_TOKENS = 16
PREFIX_BYTES = 1 << 30
"""Maximum bytes of cached prompts that no sequence uses."""

_Key = tuple[Any, tuple[int, ...]]  # the block in front, or of the first block the layers and the salt; its tokens


class KVLayout(NamedTuple):
    """The layout of keys and values: pages of `page_tokens` tokens of one layer, of `page_bytes` bytes each.

    A layer holds `state_bytes` beside them: recurrent states.
    """

    page_tokens: int
    page_bytes: int
    state_bytes: int = 0

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one layer."""
        return -(-tokens // self.page_tokens)

    def bytes(self, tokens: int, layers: int = 1) -> int:
        """Bytes of `tokens` tokens in each of `layers` layers."""
        return (self.pages(tokens) * self.page_bytes + self.state_bytes) * layers


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


class PagedKV:
    """Pages of all sequences and layers in one tensor, the tables of their indices, and the prefix cache.

    `num_layers`, `kv_heads`, `head_dim`: the model's sizes. `dtype`: dtype of the stored keys and values.
    `page_tokens`: tokens of a page. `rings`: layers that keep only the latest tokens, all in one page; a model that has
    some uses no prefix cache. `prefix_bytes`: the least recently used blocks are evicted if idle ones take more, or if
    pages are needed.

    Attributes `pages`: (pages, 2, kv_heads, page_tokens, head_dim), whose memory is taken as pages are first written.
    `table`: (num_layers, slots, width), int32: page numbers. `overlap`: additional pages that sequences would hold if
    they shared none.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        page_tokens: int = PAGE_TOKENS,
        rings: Collection[int] = (),
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        self.num_layers, self.rings, self.overlap = num_layers, rings, 0
        self._shape = (2, kv_heads, page_tokens, head_dim)
        self.layout = KVLayout(page_tokens, math.prod(self._shape) * dtype.itemsize)
        self.pages = torch.empty((0, *self._shape), dtype=dtype)
        self.table = torch.zeros((num_layers, 0, 0), dtype=torch.int32)
        self._free: list[int] = []
        self._free_slots: list[int] = []
        self._held: dict[int, list[list[int]]] = {}
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()  # least recently used first
        self._shared: dict[int, list[_Block]] = {}  # by slot: those of its first pages
        self._idle, self._most_idle = 0, prefix_bytes // self.layout.page_bytes

    def most_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence may hold at its largest."""
        prompt = len(sequence.prompt.held) * self.layout.pages(len(sequence.request.prompt))
        return max(prompt, sequence.schedule.budget(0) * self.layout.pages(sequence.total_tokens))

    @property
    def pages_held(self) -> int:
        """Pages that sequences use; a shared page counts once."""
        return len(self.pages) - len(self._free) - self._idle

    @property
    def bytes_held(self) -> int:
        """Bytes of the pages in use."""
        return self.pages_held * self.layout.page_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached prompts whose sequences have ended; not part of `bytes_held`."""
        return self._idle * self.layout.page_bytes

    def reserve(self, slots: int, tokens: int, pages: int) -> None:
        """Make room for `slots` sequences of up to `tokens` tokens and at least `pages` pages; keeps what is held."""
        _, old_slots, old_width = self.table.shape
        slots, width = max(slots, old_slots), max(self.layout.pages(tokens), old_width)
        if (slots, width) != (old_slots, old_width):
            table = torch.zeros((self.num_layers, slots, width), dtype=torch.int32)
            table[:, :old_slots, :old_width] = self.table
            self.table = table
            self._free_slots = list(range(slots - 1, old_slots - 1, -1)) + self._free_slots
        count = len(self.pages)
        if pages > count:
            # At least half as much again: otherwise every new sequence would copy all pages.
            pages = max(pages, count + count // 2)
            grown = huge_pages(torch.empty((pages, *self._shape), dtype=self.pages.dtype))
            if len(self._free) < count:
                grown[:count] = self.pages
            self.pages = grown
            # The lowest numbers are handed out first, so that pages that are never needed are never touched.
            self._free = list(range(pages - 1, count - 1, -1)) + self._free

    def fill(self) -> None:
        """Write zeros everywhere, for measurements: memory is allocated only when it is first written."""
        self.pages.zero_()

    def open(self) -> int:
        """A free slot (see `reserve`)."""
        slot = self._free_slots.pop()
        self._held[slot] = [[] for _ in range(self.num_layers)]
        self._shared[slot] = []
        return slot

    def extend(self, slot: int, layers: Iterable[int], tokens: int) -> None:
        """Take pages so that `layers` can hold `tokens` tokens of a sequence."""
        need, held = self.layout.pages(tokens), self._held[slot]
        for layer in layers:
            mine = held[layer]
            while len(mine) < (1 if layer in self.rings else need):
                if not self._free:  # the rest is in the cache, from layers that running sequences have left
                    self._evict()
                page = self._free.pop()
                self.table[layer, slot, len(mine)] = page
                mine.append(page)

    def drop(self, slot: int, layers: Iterable[int]) -> None:
        """Return the pages of layers that a sequence will not run again."""
        held, shared = self._held[slot], self._shared[slot]
        for layer in layers:
            if not held[layer]:
                continue
            for block in shared:
                block.users[layer] -= 1
                if not block.users[layer]:
                    self._release(block, layer)
            self._free.extend(reversed(held[layer][len(shared) :]))
            held[layer] = []
        while self._idle > self._most_idle:
            self._evict()

    def close(self, slot: int) -> None:
        """Return all pages and the slot of a sequence."""
        self.drop(slot, range(self.num_layers))
        del self._held[slot]
        self._free_slots.append(slot)
        for block in self._shared.pop(slot):
            block.rows -= 1
            self.overlap -= block.rows > 0

    # ------------------------------------------------------------------ the prefix cache

    def match(self, sequence: Sequence) -> int:
        """Reuse cached pages of a prompt, from its token `sequence.ran` on; returns the end of the reuse.

        At least the last token is left to run.
        """
        shared, size, end = self._shared[sequence.slot], self.layout.page_tokens, sequence.ran
        while end == len(shared) * size and end + size < len(sequence.request.prompt):
            block = self._blocks.get(self._next_key(sequence))
            if block is None:
                break
            self._share(sequence.slot, block)
            end += size
        if end > sequence.ran:
            self._touch(shared)
        return end

    def keep(self, sequence: Sequence, end: int) -> None:
        """Cache the full pages of a prompt, of which `end` tokens have run, for later sequences."""
        shared, held = self._shared[sequence.slot], self._held[sequence.slot]
        before = len(shared)
        # The last token of a prompt with layers of its own runs more layers than the others, so it is not shared.
        last = len(sequence.request.prompt) - sequence.prompt.own
        for index in range(before, min(end, last) // self.layout.page_tokens):
            key = self._next_key(sequence)
            own = {layer: held[layer][index] for layer in sequence.prompt.held}
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(key, own)
                self._idle += block.idle
            else:
                # Another row was first: the same numbers, held once.
                self._free.extend(own.values())
            self._share(sequence.slot, block)
        if len(shared) > before:
            self._touch(shared)

    def _next_key(self, sequence: Sequence) -> _Key:
        """The key of the block behind those that a sequence shares."""
        shared, size = self._shared[sequence.slot], self.layout.page_tokens
        start = len(shared) * size
        front = shared[-1] if shared else (sequence.prompt, sequence.request.cache_salt)
        return front, sequence.request.prompt[start : start + size]

    def _share(self, slot: int, block: _Block) -> None:
        """Make a block the next pages of a sequence, in place of its own pages if it has them."""
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
