"""transformers' `generate` as a peer: untouched with either cache, and on the gated model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation import StoppingCriteriaList

from skipdecode.models.attach import attach
from skipdecode.models.plan import PROMPT
from skipdecode.performance.bench.clock import TokenClock
from skipdecode.performance.bench.peers.base import Peer
from skipdecode.schedule import Schedule

__all__ = ["GatedPeer", "StaticPeer", "TransformersPeer"]


class TransformersPeer(Peer):
    """`generate` with its default, dynamic cache, untouched, at full depth."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.model = model

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self._ids = torch.full((batch, prompt), 5, device=self.model.device)
        self._new = new

    def decode_seconds(self, schedule: Schedule) -> float:
        with self.ready(schedule) as cache:
            times = self.generate(cache).times
        return times[-1] - times[0]

    @contextmanager
    def ready(self, schedule: Schedule) -> Iterator[Any]:
        """The model made ready for the schedule, and a cache that holds all of the prompt but its last token."""
        yield self._filled(DynamicCache(config=self.model.config))

    def generate(self, cache: Any) -> TokenClock:
        """Decode behind what `cache` holds; returns the times of the tokens."""
        clock = TokenClock(self._ids.device)
        self.model.generate(
            self._ids,
            attention_mask=torch.ones_like(self._ids),
            past_key_values=cache,
            max_new_tokens=self._new,
            min_new_tokens=self._new,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            num_beams=1,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock

    @torch.no_grad()
    def _filled(self, cache: Any) -> Any:
        """`cache` with all of the prompt but its last token: the keys and values of its first, over and over."""
        self.model(self._ids[:, :1], past_key_values=cache, use_cache=True)
        more = self._ids.shape[1] - 2
        for index, layer in enumerate(cache.layers):
            if more:
                first = (part[:, :, :1].expand(-1, -1, more, -1) for part in (layer.keys, layer.values))
                cache.update(*first, index)
        return cache


class StaticPeer(TransformersPeer):
    """`generate` with a static cache of just the length needed; transformers compiles it on GPUs, not on CPUs."""

    name = "transformers-static"

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        super().prepare(batch, prompt, new)
        # What is compiled is compiled now, for the cache's full size.
        self._length, self._new = prompt + new, 3
        self.decode_seconds(Schedule.full(self._geometry.num_layers))
        self._new = new

    @contextmanager
    def ready(self, schedule: Schedule) -> Iterator[Any]:
        yield self._filled(StaticCache(config=self.model.config, max_cache_len=self._length))


class GatedPeer(TransformersPeer):
    """`generate` on the gated model, under the schedule."""

    name = "gated"
    skips = True

    @contextmanager
    def ready(self, schedule: Schedule) -> Iterator[Any]:
        with attach(self.model, schedule) as attachment:
            cache = self._filled(attachment.new_cache())
            cache.advance([PROMPT] * (self._ids.shape[1] - 2))
            yield cache
