"""Times of single decode steps at a constant depth, behind a text that is made up and not computed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteriaList

from skipdecode.engine.fast_model import FastModel
from skipdecode.models.attach import Attachment
from skipdecode.models.cache import SkipCache
from skipdecode.models.plan import PROMPT
from skipdecode.performance.bench.clock import TokenClock
from skipdecode.performance.bench.peers.fast import EnginePeer
from skipdecode.schedule import Schedule

__all__ = ["StepTimes", "engine_steps", "transformers_steps"]

# (depth, cached tokens of a row) -> seconds of each step.
StepTimes = Callable[[int, int], list[float]]


def transformers_steps(attachment: Attachment, batch: int, steps: int) -> StepTimes:
    """Of `generate` on the gated model.

    Parameters
    ----------
    attachment : Attachment
        Its schedule is changed.
    batch, steps : int
        Rows, and steps of a run.
    """
    model = attachment.model

    def run(depth: int, tokens: int) -> list[float]:
        attachment.schedule = _flat(attachment.schedule.num_layers, depth)
        ids = torch.zeros(batch, tokens + 1, dtype=torch.long, device=model.device)
        cache = _filled_cache(attachment, ids[:, :1], tokens)
        clock = TokenClock(model.device)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=steps + 1,
            eos_token_id=None,
            pad_token_id=0,
            do_sample=False,
            num_beams=1,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return [after - before for before, after in pairwise(clock.times)]

    return run


def engine_steps(model: Any, fast: FastModel, batch: int, steps: int) -> StepTimes:
    """Of the package's own engine.

    Parameters
    ----------
    model : transformers causal LM
        That `fast` was made of.
    fast : FastModel
    batch, steps : int
        Rows, and steps of a run.
    """
    # One for each length: an engine behind the text is copied for each run, not filled anew.
    peers: dict[int, EnginePeer] = {}

    def run(depth: int, tokens: int) -> list[float]:
        if tokens not in peers:
            peers[tokens] = EnginePeer(model, fast)
            peers[tokens].prepare(batch, tokens + 1, steps + 1)
        return peers[tokens].step_seconds(_flat(fast.num_layers, depth))

    return run


def _flat(layers: int, depth: int) -> Schedule:
    return Schedule.constant(layers, depth, warmup_layers=0)


def _filled_cache(attachment: Attachment, first: Tensor, tokens: int) -> SkipCache:
    """A cache with `tokens` prompt tokens a row: those of the first, over and over."""
    cache = attachment.new_cache()
    attachment.model(first, past_key_values=cache, use_cache=True)
    more = tokens - 1
    if more:
        for index, layer in enumerate(cache.layers):
            cache.update(*(part.expand(-1, -1, more, -1) for part in (layer.keys, layer.values)), index)
        cache.advance([PROMPT] * more)
    return cache
