"""transformers' `generate` as a peer: untouched with either cache, and with its lossless drafting.

What drafting gains depends on the text and the model: drafts of an untrained model say nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from skipdecode.engine.generate import GenerateEngine, LayerCount
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.models.families import decoder_layers
from skipdecode.performance.bench.peers import Peer, Rows
from skipdecode.performance.bench.peers.own import repeat_first
from skipdecode.schedule import Schedule

__all__ = ["DraftingPeer", "TransformersPeer"]

_DRAFT_TOKENS = 10


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


class DraftingPeer(Peer):
    """A drafting method: one row, whose seconds are those of as many tokens as the others make.

    "early-exit": the first `exit_layer` layers draft (`assistant_early_exit`). "prompt-lookup": drafts are what
    followed the last tokens earlier in the text. The prompt is the beginning of `text`, the tokens of a real one.

    Raises UsageError if the layers that draft are none or all, or transformers cannot leave this model early.
    """

    max_batch = 1

    def __init__(self, model: Any, name: str, text: list[int], exit_layer: int) -> None:
        super().__init__(model)
        self.name, self._text = name, text
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": _DRAFT_TOKENS}
        if name == "early-exit":
            _check_leaves_early(model, exit_layer)
            self._options = {"assistant_early_exit": exit_layer}
        self._layers = self._heads = 0.0

    def engine(self, schedule: Schedule, rows: Rows) -> GenerateEngine:
        self._count = LayerCount(self.model)
        options = self._options | {"min_new_tokens": rows.new}
        return GenerateEngine(self.model, max_rows=1, options=options, around=lambda ends: self._count)

    def requests(self, rows: Rows) -> list[Request]:
        repeated = self._text * -(-rows.prompt // len(self._text))
        return [Request(tuple(repeated[: rows.prompt]), rows.new)]

    def step_seconds(self, schedule: Schedule, rows: Rows) -> list[float]:
        """Mean seconds of a token behind the first group of tokens, which the prompt's forward brings."""
        times = self.run(schedule, rows)
        tokens = sum(time > times[0] for time in times)
        if not tokens:
            raise UsageError(f"{self.name} had all tokens drafted at once: give a larger --new than {rows.new}")
        self._layers, self._heads = (
            sum(time > times[0] for time in calls) / tokens for calls in (self._count.layers, self._count.heads)
        )
        return [(times[-1] - times[0]) / tokens] * (rows.new - 1)

    def step_bytes(self, schedule: Schedule, rows: Rows) -> float:
        """Of one token of the output: weights are read once a forward, drafts' and checks' alike."""
        reads = self.reads(1)
        fixed = reads.step_seconds(0)
        return self._heads * fixed + self._layers * (reads.step_seconds(1, rows.prompt + rows.new / 2) - fixed)

    def mean_layers(self, schedule: Schedule, rows: Rows) -> float:
        """Layers read for one token of the output."""
        return self._layers


@torch.inference_mode()
def _check_leaves_early(model: Any, exit_layer: int) -> None:
    """transformers asks for fewer layers through the config, which some models' forward does not read."""
    config, layers = model.config, len(decoder_layers(model))
    if not 1 <= exit_layer < layers:
        raise UsageError(f"exit_layer={exit_layer} is not accepted for {layers} layers: give 1 to {layers - 1}")
    with LayerCount(model) as count:
        config.num_hidden_layers = exit_layer
        try:
            model(torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)
        finally:
            config.num_hidden_layers = layers
    if len(count.layers) != exit_layer:
        raise UsageError(
            f"transformers does not leave a model of type {config.model_type!r} early: leave 'early-exit' out of "
            "--engines"
        )
