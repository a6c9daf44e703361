"""transformers' lossless drafting methods as peers: one row, a real text, seconds of as many tokens as the others make.

What they gain depends on the text and the model: drafts of an untrained model say nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers.generation import StoppingCriteriaList

from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.drafting import PromptLookup, SelfSpeculation
from skipdecode.models.families import decoder_layers
from skipdecode.performance.bench.clock import TokenClock
from skipdecode.performance.bench.peers.base import Peer
from skipdecode.schedule import Schedule

__all__ = ["EarlyExitPeer", "PromptLookupPeer"]


class _DraftingPeer(Peer):
    """A drafting method of transformers' `generate`.

    Parameters
    ----------
    model : transformers causal LM
    text : sequence of int
        Tokens of a real text; its beginning is the prompt.
    options : dict
        What turns the method on.
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
        clock = _CountingClock(self._model.device)
        with ExitStack() as stack:
            for layer in decoder_layers(self._model):
                stack.callback(layer.register_forward_pre_hook(clock.counter("layer")).remove)
            stack.callback(self._model.get_output_embeddings().register_forward_pre_hook(clock.counter("head")).remove)
            self._model.generate(
                self._ids,
                attention_mask=torch.ones_like(self._ids),
                max_new_tokens=self._new,
                min_new_tokens=self._new,
                eos_token_id=None,
                pad_token_id=0,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                stopping_criteria=StoppingCriteriaList([clock]),
                **self._options,
            )
        self._tokens = clock.lengths[-1] - clock.lengths[0]
        if self._tokens < 1:
            raise UsageError(f"{self.name} had all tokens drafted at once: give a larger --new than {self._new}")
        (layers, heads), (all_layers, all_heads) = clock.marks[0], clock.marks[-1]
        self._layer_calls, self._head_calls = all_layers - layers, all_heads - heads
        return (clock.times[-1] - clock.times[0]) * (self._new - 1) / self._tokens

    def step_bytes(self, schedule: Schedule, batch: int, prompt: int, new: int) -> float:
        """Of one token of the output: weights are read once a forward, drafts' and checks' alike."""
        reads = self.reads(1)
        layer = reads.step_seconds(1, prompt + new / 2) - reads.fixed_seconds
        return (self._layer_calls * layer + self._head_calls * reads.fixed_seconds) / self._tokens

    def mean_layers(self, schedule: Schedule, steps: int) -> float:
        """Layers read for one token of the output."""
        return self._layer_calls / self._tokens


class EarlyExitPeer(_DraftingPeer):
    """Self-speculation: the first `exit_layer` layers draft (`assistant_early_exit`).

    Raises
    ------
    UsageError
        If the layers that draft are none or all, or transformers cannot leave this model early.
    """

    name = "early-exit"

    def __init__(self, model: Any, text: list[int], exit_layer: int) -> None:
        method = SelfSpeculation(exit_layer)
        method.check(model)
        _check_leaves_early(model, exit_layer)
        super().__init__(model, text, method.options())


class PromptLookupPeer(_DraftingPeer):
    """Drafts are what followed the last tokens earlier in the text (`prompt_lookup_num_tokens`)."""

    name = "prompt-lookup"

    def __init__(self, model: Any, text: list[int]) -> None:
        super().__init__(model, text, PromptLookup().options())


class _CountingClock(TokenClock):
    """Notes what was called up to each time, too."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.marks: list[tuple[int, int]] = []
        self._calls = {"layer": 0, "head": 0}

    def counter(self, kind: str) -> Callable[..., None]:
        """A hook that counts calls of a kind."""

        def count(*arguments: object) -> None:
            self._calls[kind] += 1

        return count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.marks.append((self._calls["layer"], self._calls["head"]))
        return super().__call__(input_ids, scores, **kwargs)


@torch.inference_mode()
def _check_leaves_early(model: Any, exit_layer: int) -> None:
    """transformers asks for fewer layers through the config, which some models' forward does not read."""
    config, clock = model.config, _CountingClock(model.device)
    layers = config.num_hidden_layers
    with ExitStack() as stack:
        for layer in decoder_layers(model):
            stack.callback(layer.register_forward_pre_hook(clock.counter("layer")).remove)
        stack.callback(setattr, config, "num_hidden_layers", layers)
        config.num_hidden_layers = exit_layer
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        model(ids, use_cache=False)
        clock(ids, None)
    if clock.marks[0][0] != exit_layer:
        raise UsageError(
            f"transformers does not leave a model of type {config.model_type!r} early: leave 'early-exit' out of "
            "--engines"
        )
