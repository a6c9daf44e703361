"""Keys and values in pages. A sequence holds the pages that it needs in each layer, and nothing is copied.

A page is `page_tokens` tokens of one layer of one sequence. Skipped layers have no pages. A layer that a sequence will
never run again returns its pages, and so does a finished sequence. The bytes held are therefore at most the sum of
active tokens x layers, plus less than one page per sequence and active layer. Sequences may share full pages of prompts
(`skipdecode.engine.prefix_cache`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from skipdecode.engine.kernels.weights import huge_pages
from skipdecode.engine.prefix_cache import Block, PrefixCache
from skipdecode.engine.sequence import Sequence

PAGE_TOKENS = 16
PREFIX_BYTES = 1 << 30
"""Maximum bytes of cached prompts that no sequence uses."""


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


class PagedKV:
    """Pages of all sequences and layers in one tensor, and the tables of their indices.

    `num_layers`, `kv_heads`, `head_dim`: the model's sizes. `dtype`: dtype of the stored keys and values.
    `page_tokens`: tokens of a page. `rings`: layers that keep only the latest tokens, all in one page; a model that has
    some uses no prefix cache. `prefix_bytes`: most bytes of cached prompts that no sequence uses.

    Attributes `pages`: (pages, 2, kv_heads, page_tokens, head_dim), whose memory is taken as pages are first written.
    `table`: (num_layers, slots, width), int32: page numbers. `prefixes`: the shared pages.
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
        self.num_layers, self.rings = num_layers, rings
        self._shape = (2, kv_heads, page_tokens, head_dim)
        self.layout = KVLayout(page_tokens, math.prod(self._shape) * dtype.itemsize)
        self.pages = torch.empty((0, *self._shape), dtype=dtype)
        self.table = torch.zeros((num_layers, 0, 0), dtype=torch.int32)
        self._free: list[int] = []
        self._free_slots: list[int] = []
        self._held: dict[int, list[list[int]]] = {}
        self._shared: dict[int, list[Block]] = {}  # by slot
        self.prefixes = PrefixCache(page_tokens, prefix_bytes // self.layout.page_bytes)

    def most_pages(self, sequence: Sequence) -> int:
        """Pages that a sequence may hold at its largest."""
        prompt = len(sequence.prompt.held) * self.layout.pages(len(sequence.request.prompt))
        return max(prompt, sequence.schedule.budget(0) * self.layout.pages(sequence.total_tokens))

    @property
    def bytes_held(self) -> int:
        """Bytes of the pages that sequences use; a shared page counts once."""
        return (len(self.pages) - len(self._free) - self.prefixes.idle) * self.layout.page_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached prompts whose sequences have ended; not part of `bytes_held`."""
        return self.prefixes.idle * self.layout.page_bytes

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
            pages = held[layer]
            while len(pages) < (1 if layer in self.rings else need):
                if not self._free:  # the rest is in the cache, from layers that running sequences have left
                    self._free.extend(self.prefixes.evict())
                page = self._free.pop()
                self.table[layer, slot, len(pages)] = page
                pages.append(page)

    def drop(self, slot: int, layers: Iterable[int]) -> None:
        """Return the pages of layers that a sequence will not run again."""
        held, shared = self._held[slot], self._shared[slot]
        for layer in filter(held.__getitem__, layers):
            self._free.extend(self.prefixes.release(shared, layer))
            self._free.extend(reversed(held[layer][len(shared) :]))
            held[layer] = []
        while self.prefixes.idle > self.prefixes.max_idle:
            self._free.extend(self.prefixes.evict())

    def close(self, slot: int) -> None:
        """Return all pages and the slot of a sequence."""
        self.drop(slot, range(self.num_layers))
        del self._held[slot]
        self._free_slots.append(slot)
        self.prefixes.close(self._shared.pop(slot))

    def reuse_prefix(self, sequence: Sequence) -> int:
        """Reuse cached pages of a prompt, from its token `sequence.ran` on; returns the end of the reuse.

        At least the last token is left to run.
        """
        shared = self._shared[sequence.slot]
        first = len(shared)
        self.prefixes.match(sequence, shared)
        self._use_blocks(sequence.slot, first)
        return sequence.ran + (len(shared) - first) * self.layout.page_tokens

    def cache_prefix(self, sequence: Sequence, end: int) -> None:
        """Cache the full pages of a prompt, of which `end` tokens have run, for later sequences."""
        shared, held = self._shared[sequence.slot], self._held[sequence.slot]
        # The last token of a prompt with a layer set of its own runs more layers than the others, so it is not shared.
        last = len(sequence.request.prompt) - sequence.prompt.explicit
        first = len(shared)
        for index in range(first, min(end, last) // self.layout.page_tokens):
            pages = {layer: held[layer][index] for layer in sequence.prompt.held}
            block = self.prefixes.add(sequence, shared, pages)
            if block.pages is not pages:  # another sequence was first: the same numbers, held once
                self._free.extend(pages.values())
        self._use_blocks(sequence.slot, first)

    def _use_blocks(self, slot: int, first: int) -> None:
        """Use the pages of a sequence's blocks, from number `first` on, in place of its own if it has them."""
        shared = self._shared[slot]
        for index in range(first, len(shared)):
            for layer, page in shared[index].pages.items():
                self._held[slot][layer][index : index + 1] = [page]
                self.table[layer, slot, index] = page
        if len(shared) > first:
            self.prefixes.touch(shared)
