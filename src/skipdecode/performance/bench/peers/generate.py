"""transformers' `generate` as a peer, untouched, with either cache."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from skipdecode.engine.generate import GenerateEngine
from skipdecode.performance.bench.peers import Peer, Rows
from skipdecode.performance.bench.peers.own import repeat_first
from skipdecode.schedule import Schedule

__all__ = ["TransformersPeer"]


class TransformersPeer(Peer):
    """`generate` at full depth, untouched, with its default, dynamic cache ("transformers") or a static one of just the
    length needed ("transformers-static"), for which it compiles steps on GPUs.
    """

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(model)
        self.name, self._static = name, name == "transformers-static"
        self.warms = self._static and model.device.type != "cpu"

    def engine(self, schedule: Schedule, rows: Rows) -> GenerateEngine:
        """See `Peer`; behind a cache that holds all of the prompt but its last token, made up."""
        options: dict[str, Any] = {"min_new_tokens": rows.new}
        if rows.new > 1:
            options["past_key_values"] = self._filled(rows)
        return GenerateEngine(self.model, max_rows=rows.batch, options=options)

    @torch.inference_mode()
    def _filled(self, rows: Rows) -> Any:
        cache: Any = DynamicCache(config=self.model.config)
        if self._static:
            cache = StaticCache(config=self.model.config, max_cache_len=rows.prompt + rows.new)
        ids = torch.full((rows.batch, 1), 5, device=self.model.device)
        self.model(ids, past_key_values=cache, use_cache=True)
        repeat_first(cache, rows.prompt - 2)
        return cache
