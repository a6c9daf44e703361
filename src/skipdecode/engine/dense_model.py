"""The fast path in torch operators: decode steps of fixed shape over a static KV cache; prompts operator by operator.

On GPUs the steps are captured as CUDA graphs. On CPUs without the C++ kernels they run as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from skipdecode.engine.fast_model import FastModel, TokenRows
from skipdecode.engine.kernels.dense import DenseDecoder, Segment
from skipdecode.engine.kernels.graphs import GraphCapture, capture_for
from skipdecode.engine.kernels.static_cache import StaticCache, token_bucket
from skipdecode.engine.static_kv import StaticKV
from skipdecode.schedule import Schedule
from skipdecode.schedule.levels import fewest_levels

__all__ = ["DenseModel"]


class DenseModel(FastModel):
    """The fast path of a transformers model in torch operators.

    Where steps can be captured, one is for every number of places (powers of two), of columns that attention reads (see
    `skipdecode.engine.kernels.static_cache.token_bucket`) and set of layers that some row runs, when it first comes up.
    `new_capture` makes what captures steps: by default CUDA graphs on GPUs, nothing elsewhere. `hint` says why the C++
    kernels do not serve, where they were wanted.
    """

    kernel = "dense"

    def __init__(self, model: Any, new_capture: Callable[[], GraphCapture] | None = None, hint: str = "") -> None:
        # Kept when their KV store is gone, for the next one: what was captured on them stays of use.
        self._users: dict[StaticCache, weakref.ref[StaticKV]] = {}
        super().__init__(model)
        self.hint = hint
        self._new_capture = new_capture or capture_for(self.device)

    @property
    def captures_graphs(self) -> bool:
        return self._new_capture is not None

    def new_kv(self) -> StaticKV:
        """An empty KV store for this model's forwards, in a static cache that no other store uses."""
        free = next((cache for cache, user in self._users.items() if user() is None), None)
        kv = StaticKV(free or self._new_cache())
        self._users[kv.cache] = weakref.ref(kv)
        return kv

    def suited(self, schedule: Schedule) -> Schedule:
        """The schedule with the fewest budgets that keep 98% of its saving: each takes graphs of its own."""
        return fewest_levels(schedule).schedule

    @torch.inference_mode()
    def forward(self, rows: TokenRows, kv: StaticKV) -> Tensor:
        if len(set(rows.slots)) == len(rows.slots):
            return self._decode(rows, kv)
        return self._prompts(rows, kv)

    def _decode(self, rows: TokenRows, kv: StaticKV) -> Tensor:
        """One token a slot."""
        cache, covered = kv.cache, kv.close_ranks()
        places = kv.places(rows.slots)
        length = min(token_bucket(max(rows.positions) + 1), cache.capacity)
        ran = tuple(index for index, count in enumerate(rows.counts) if count)
        cache.load(places, rows.tokens, rows.positions, rows.counts, covered)
        cache.graphs.run((covered, length, ran), partial(self._decoder.step, cache, covered, length, ran))
        wanted = [places[row] for row in rows.wanted]
        if wanted == list(range(len(wanted))):
            return cache.logits[: len(wanted)]
        return cache.logits.index_select(0, self._ids(wanted))

    def _prompts(self, rows: TokenRows, kv: StaticKV) -> Tensor:
        segments: list[Segment] = []
        for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            if row and slot == rows.slots[row - 1]:
                segments[-1] = segments[-1]._replace(end=row + 1)
            else:
                segments.append(Segment(kv.places([slot])[0], row, row + 1, position))
        given = self._ids(rows.tokens), self._ids(rows.positions)
        return self._decoder.prompts(kv.cache, *given, segments, rows.counts, self._ids(rows.wanted)).float()

    def _ids(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _bind(self) -> None:
        """Take the weights' addresses; steps captured with others are of no use."""
        self._decoder = DenseDecoder(self._spec)
        for cache in self._users:
            cache.graphs.clear()

    def _new_cache(self) -> StaticCache:
        attention = self._spec.layers[0].attention
        shape = self.num_layers, attention.kv_heads, attention.head_dim
        return StaticCache(shape, self.vocab_size, self.dtype, self.device, self._new_capture)
