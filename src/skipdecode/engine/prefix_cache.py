"""The prefix cache: pages of prompts that later sequences with the same beginning share. Pure Python.

A *block* has one page of each layer that a prompt runs: the keys and values of a full page of its tokens. The key of a
block is the layers, the request's `cache_salt`, the preceding block (which stands for all earlier tokens), and its own
tokens. Keys are compared, not only hashed. Sequences only read a shared page, because they write behind the full pages
of the prompt. Pages of generated tokens are never cached: layers that these tokens skipped hold nothing of them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from skipdecode.engine.sequence import Sequence

_Key = tuple[Any, tuple[int, ...]]  # the block in front, or of the first block the layers and the salt; its tokens


class Block:
    """A page of each layer with the same tokens, and the number of sequences that use each page."""

    def __init__(self, key: _Key, pages: dict[int, int]) -> None:
        self.key, self.pages = key, pages
        self.sequences = 0
        self.users = dict.fromkeys(pages, 0)  # by layer; sequences leave layers early
        self.idle = len(pages)  # pages without a user
        self.cached = True  # later sequences can share it


class PrefixCache:
    """The cached blocks. `shared` of its methods are the blocks at the beginning of a sequence, in order.

    `page_tokens`: tokens of a page. `max_idle`: if more pages have no user, the least recently used blocks are evicted.

    Attributes `idle`: pages without a user. `overlap`: additional pages that sequences would hold if they shared none.
    """

    def __init__(self, page_tokens: int, max_idle: int) -> None:
        self.idle, self.overlap, self.max_idle = 0, 0, max_idle
        self._page_tokens = page_tokens
        self._blocks: OrderedDict[_Key, Block] = OrderedDict()  # least recently used first

    def match(self, sequence: Sequence, shared: list[Block]) -> None:
        """Extend `shared` by the cached blocks that follow the token `sequence.ran`; a prompt's last token is left."""
        size, end = self._page_tokens, sequence.ran
        while end == len(shared) * size and end + size < len(sequence.request.prompt):
            block = self._blocks.get(self._next_key(sequence, shared))
            if block is None:
                break
            self._share(shared, block)
            end += size

    def add(self, sequence: Sequence, shared: list[Block], pages: dict[int, int]) -> Block:
        """Extend `shared` by a block of a sequence's next pages, by layer, or by an earlier block of these tokens."""
        key = self._next_key(sequence, shared)
        if key not in self._blocks:
            self._blocks[key] = Block(key, pages)
            self.idle += len(pages)
        self._share(shared, self._blocks[key])
        return shared[-1]

    def touch(self, shared: list[Block]) -> None:
        """Record a use, the first block last: later blocks cannot be found without it, so they are evicted earlier."""
        for block in reversed(shared):
            if block.cached:
                self._blocks.move_to_end(block.key)

    def release(self, shared: list[Block], layer: int) -> list[int]:
        """Let a sequence leave a layer; returns the pages that nobody needs any more."""
        unneeded = []
        for block in shared:
            block.users[layer] -= 1
            if not block.users[layer] and block.cached:
                block.idle += 1
                self.idle += 1
            elif not block.users[layer]:
                unneeded.append(block.pages[layer])
        return unneeded

    def close(self, shared: list[Block]) -> None:
        """Let a sequence go that has left all layers."""
        for block in shared:
            block.sequences -= 1
            self.overlap -= block.sequences > 0

    def evict(self) -> list[int]:
        """Evict the least recently used block that has idle pages; returns these."""
        block = next(block for block in self._blocks.values() if block.idle)
        del self._blocks[block.key]
        block.cached = False
        self.idle -= block.idle
        return [page for layer, page in block.pages.items() if not block.users[layer]]

    def _next_key(self, sequence: Sequence, shared: list[Block]) -> _Key:
        """The key of the block behind those that a sequence shares."""
        start = len(shared) * self._page_tokens
        front = shared[-1] if shared else (sequence.prompt, sequence.request.cache_salt)
        return front, sequence.request.prompt[start : start + self._page_tokens]

    def _share(self, shared: list[Block], block: Block) -> None:
        self.idle -= block.idle
        block.idle = 0
        block.sequences += 1
        self.overlap += block.sequences > 1
        for layer in block.users:
            block.users[layer] += 1
        shared.append(block)
