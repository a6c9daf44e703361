"""Keys and values in pages: each (row, layer) holds what it needs, to within one page, and nothing moves.

A page is `page_tokens` tokens of one layer of one row. Skipped layers get none, a layer that a row will never run again
gives its pages back, and so does a finished row; nothing is copied when rows come, grow or go. The bytes held are
therefore at most the exact sum of active tokens x layers plus less than one page for each (row, active layer).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch

from skipdecode.engine.depth import PromptLayers
from skipdecode.engine.kernels.memory import huge_pages

__all__ = ["KV", "PAGE_TOKENS", "PagedKV"]

PAGE_TOKENS = 16


class KV(ABC):
    """What the engine needs of a store of keys and values.

    Attributes
    ----------
    page_tokens : int
        Room is counted in stretches, pages, of this many tokens of one layer of one row.
    overlap : int
        Pages of one layer that rows would hold besides, if they shared none.
    """

    page_tokens: int
    overlap: int = 0

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of what is in use."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.token_bytes * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens of one layer."""
        return -(-tokens // self.page_tokens)

    @abstractmethod
    def reserve(self, slots: int, tokens: int, pages: int, most_pages: int | None = None) -> None:
        """Make room for `slots` rows of up to `tokens` tokens and for `pages` pages; keeps what is held.

        There may be more pages than asked for, but not more than `most_pages`.
        """

    @abstractmethod
    def fill(self) -> None:
        """Write zeros everywhere, for measurements: memory that was never written is no memory yet."""

    @abstractmethod
    def open(self) -> int:
        """A free slot (see `reserve`)."""

    @abstractmethod
    def extend(self, slot: int, layers: Iterable[int], tokens: int) -> None:
        """See to it that `layers` can hold `tokens` tokens of a row."""

    @abstractmethod
    def drop(self, slot: int, layers: Iterable[int]) -> None:
        """Give back what a row holds of layers that it will not run again."""

    @abstractmethod
    def close(self, slot: int) -> None:
        """Give back all of a row."""

    @property
    def cached_bytes(self) -> int:
        """Bytes that are kept of prompts whose rows have left; no part of `bytes_held`."""
        return 0

    def match(self, slot: int, layers: PromptLayers, prompt: tuple[int, ...], fed: int) -> int:
        """Take over what is kept of a prompt with these `layers`, from its token `fed` on; returns where it ends.

        At least the last token is left to run.
        """
        return fed

    def keep(  # noqa: B027  # most keep nothing
        self, slot: int, layers: PromptLayers, prompt: tuple[int, ...], fed: int
    ) -> None:
        """Share what a row holds of its prompt, of which `fed` tokens have run `layers`, with rows to come."""


class PagedKV(KV):
    """Pages of all rows and layers in one tensor, and the tables that say where they are.

    Parameters
    ----------
    num_layers, kv_heads, head_dim : int
        The model's sizes.
    dtype : torch.dtype
        Type of the stored keys and values.
    page_tokens : int
        Tokens that a page holds.

    Attributes
    ----------
    pages : torch.Tensor
        (pages, 2, kv_heads, page_tokens, head_dim). On CPUs its memory is only taken as pages are first written.
    table : torch.Tensor
        (num_layers, slots, width), int32 on the CPU: page numbers.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self.num_layers, self.page_tokens = num_layers, page_tokens
        self._shape = (2, kv_heads, page_tokens, head_dim)
        self.pages = torch.empty((0, *self._shape), dtype=dtype, device=device)
        self.table = torch.zeros((num_layers, 0, 0), dtype=torch.int32)
        self._free: list[int] = []
        self._free_slots: list[int] = []
        self._held: dict[int, list[list[int]]] = {}

    @property
    def token_bytes(self) -> int:
        kv, heads, _, dim = self._shape
        return kv * heads * dim * self.pages.element_size()

    @property
    def pages_held(self) -> int:
        """Pages in use."""
        return len(self.pages) - len(self._free)

    @property
    def bytes_held(self) -> int:
        return self.pages_held * self.page_bytes

    def reserve(self, slots: int, tokens: int, pages: int, most_pages: int | None = None) -> None:
        _, old_slots, old_width = self.table.shape
        slots, width = max(slots, old_slots), max(self.pages_for(tokens), old_width)
        if (slots, width) != (old_slots, old_width):
            table = torch.zeros((self.num_layers, slots, width), dtype=torch.int32)
            table[:, :old_slots, :old_width] = self.table
            self.table = table
            self._free_slots = list(range(slots - 1, old_slots - 1, -1)) + self._free_slots
        count = len(self.pages)
        if pages > count:
            # Half as much again at least: rows that come one by one would copy everything each time.
            more = count + count // 2
            pages = max(pages, more if most_pages is None else min(more, most_pages))
            grown = huge_pages(torch.empty((pages, *self._shape), dtype=self.pages.dtype, device=self.pages.device))
            if len(self._free) < count:
                grown[:count] = self.pages
            self.pages = grown
            # Lowest numbers are handed out first, so that pages never needed are never touched.
            self._free = list(range(pages - 1, count - 1, -1)) + self._free

    def fill(self) -> None:
        self.pages.zero_()

    def open(self) -> int:
        slot = self._free_slots.pop()
        self._held[slot] = [[] for _ in range(self.num_layers)]
        return slot

    def extend(self, slot: int, layers: Iterable[int], tokens: int) -> None:
        need, held = self.pages_for(tokens), self._held[slot]
        for layer in layers:
            mine = held[layer]
            while len(mine) < need:
                page = self._take()
                self.table[layer, slot, len(mine)] = page
                mine.append(page)

    def _take(self) -> int:
        """A free page."""
        return self._free.pop()

    def drop(self, slot: int, layers: Iterable[int]) -> None:
        held = self._held[slot]
        for layer in layers:
            self._free.extend(reversed(held[layer]))
            held[layer] = []

    def close(self, slot: int) -> None:
        self.drop(slot, range(self.num_layers))
        del self._held[slot]
        self._free_slots.append(slot)
