"""transformers' `generate` as a peer: untouched with either cache, on the gated model, and with its lossless drafting.

What drafting gains depends on the text and the model: drafts of an untrained model say nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from skipdecode.errors import UsageError
from skipdecode.models.attach import attach
from skipdecode.models.families import decoder_layers
from skipdecode.models.plan import PROMPT
from skipdecode.performance.bench.peers import Peer
from skipdecode.performance.machine import synchronize
from skipdecode.schedule import Schedule

__all__ = ["EarlyExitPeer", "GatedPeer", "PromptLookupPeer", "StaticPeer", "TransformersPeer"]


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """A stopping criterion that never stops, and notes when `generate` had its tokens.

    Attributes
    ----------
    times : list of float
        Seconds, one entry a call: a token of every row, or of a drafting method a group of tokens.
    lengths : list of int
        Tokens of a row at those times, the prompt's included.
    marks : list of (int, int)
        Layers and heads run up to those times, where `counting` is on.
    """

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self.lengths: list[int] = []
        self.marks: list[tuple[int, int]] = []
        self._calls = {"layer": 0, "head": 0}
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize(self._device)
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        self.marks.append((self._calls["layer"], self._calls["head"]))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """While this holds, calls of the model's layers and head are counted."""

        def counter(kind: str) -> Callable[..., None]:
            def count(*arguments: object) -> None:
                self._calls[kind] += 1

            return count

        with ExitStack() as stack:
            for layer in decoder_layers(model):
                stack.callback(layer.register_forward_pre_hook(counter("layer")).remove)
            stack.callback(model.get_output_embeddings().register_forward_pre_hook(counter("head")).remove)
            yield


def _generate(model: Any, ids: torch.Tensor, new: int, clock: _Clock, **options: Any) -> None:
    """`new` tokens, greedy, without an end token."""
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        num_beams=1,
        stopping_criteria=StoppingCriteriaList([clock]),
        **options,
    )


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
        return sum(self.step_seconds(schedule))

    def step_seconds(self, schedule: Schedule) -> list[float]:
        """Seconds of each step; see `decode_seconds`."""
        with self.ready(schedule) as cache:
            times = self.generate(cache)
        return [after - before for before, after in pairwise(times)]

    def prompt_seconds(self, batch: int, prompt: int) -> float:
        """Seconds of a full-depth forward over the rows' prompts, with the choice of the first token."""
        self.prepare(batch, prompt, 1)
        synchronize(self.model.device)
        start = time.perf_counter()
        return self.generate(None)[0] - start

    @contextmanager
    def ready(self, schedule: Schedule) -> Iterator[Any]:
        """The model made ready for the schedule, and a cache that holds all of the prompt but its last token."""
        yield self._filled(DynamicCache(config=self.model.config))

    def generate(self, cache: Any) -> list[float]:
        """Decode behind what `cache` holds (None: nothing); returns the times of the tokens."""
        clock = _Clock(self._ids.device)
        _generate(self.model, self._ids, self._new, clock, past_key_values=cache)
        return clock.times

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


class _DraftingPeer(Peer):
    """A drafting method, which `options` turn on: one row, seconds of as many tokens as the others make.

    The prompt is the beginning of `text`, the tokens of a real one.
    """

    max_batch = 1

    def __init__(self, model: Any, text: list[int], options: dict[str, Any]) -> None:
        super().__init__(model)
        self._model, self._text, self._options = model, text, options
        self._layer_calls = self._head_calls = 0
        self._tokens = 1

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        if len(self._text) < prompt:
            self._text = self._text * -(-prompt // len(self._text))
        self._ids = torch.tensor([self._text[:prompt]], device=self._model.device)
        self._new = new

    def decode_seconds(self, schedule: Schedule) -> float:
        """Of `new` - 1 tokens, at the rate behind the first group of tokens, which the prompt's forward brings."""
        clock = _Clock(self._model.device)
        with clock.counting(self._model):
            _generate(self._model, self._ids, self._new, clock, repetition_penalty=1.0, **self._options)
        self._tokens = clock.lengths[-1] - clock.lengths[0]
        if self._tokens < 1:
            raise UsageError(f"{self.name} had all tokens drafted at once: give a larger --new than {self._new}")
        (layers, heads), (all_layers, all_heads) = clock.marks[0], clock.marks[-1]
        self._layer_calls, self._head_calls = all_layers - layers, all_heads - heads
        return (clock.times[-1] - clock.times[0]) * (self._new - 1) / self._tokens

    def step_bytes(self, schedule: Schedule, batch: int, prompt: int, new: int) -> float:
        """Of one token of the output: weights are read once a forward, drafts' and checks' alike."""
        reads = self.reads(1)
        fixed = reads.step_seconds(0)
        layer = reads.step_seconds(1, prompt + new / 2) - fixed
        return (self._layer_calls * layer + self._head_calls * fixed) / self._tokens

    def mean_layers(self, schedule: Schedule, steps: int) -> float:
        """Layers read for one token of the output."""
        return self._layer_calls / self._tokens


class EarlyExitPeer(_DraftingPeer):
    """Self-speculation: the first `exit_layer` layers draft (`assistant_early_exit`).

    Raises UsageError if those are none or all, or transformers cannot leave this model early.
    """

    name = "early-exit"

    def __init__(self, model: Any, text: list[int], exit_layer: int) -> None:
        layers = len(decoder_layers(model))
        if not 1 <= exit_layer < layers:
            raise UsageError(f"exit_layer={exit_layer} is not accepted for {layers} layers: give 1 to {layers - 1}")
        _check_leaves_early(model, exit_layer)
        super().__init__(model, text, {"assistant_early_exit": exit_layer})


class PromptLookupPeer(_DraftingPeer):
    """Drafts are what followed the last tokens earlier in the text (`prompt_lookup_num_tokens`)."""

    name = "prompt-lookup"

    def __init__(self, model: Any, text: list[int]) -> None:
        super().__init__(model, text, {"prompt_lookup_num_tokens": 10})


@torch.inference_mode()
def _check_leaves_early(model: Any, exit_layer: int) -> None:
    """transformers asks for fewer layers through the config, which some models' forward does not read."""
    config, clock = model.config, _Clock(model.device)
    layers = config.num_hidden_layers
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with clock.counting(model):
        config.num_hidden_layers = exit_layer
        try:
            model(ids, use_cache=False)
        finally:
            config.num_hidden_layers = layers
    clock(ids, None)
    if clock.marks[0][0] != exit_layer:
        raise UsageError(
            f"transformers does not leave a model of type {config.model_type!r} early: leave 'early-exit' out of "
            "--engines"
        )
