"""What is measured against each other: one small class an engine. All time decode steps only, greedy, without an end.

A step's time does not depend on what the cache holds, only on how much. So no peer computes a prompt in a timed run:
the engine goes on from a copy of its state behind the prompt, the transformers peers from a cache of one token's keys
and values, repeated.
"""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from skipdecode.bench.machine import synchronize
from skipdecode.decoding.budget_policy import RowView
from skipdecode.decoding.engine import Engine
from skipdecode.decoding.fast_model import FastModel
from skipdecode.decoding.requests import Request
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.models.attach import attach
from skipdecode.models.plan import PROMPT
from skipdecode.schedule import Schedule

__all__ = ["PEERS", "Peer", "make_peer"]


class Peer(ABC):
    """An engine under measurement.

    Attributes
    ----------
    name : str
    skips : bool
        Whether it can run schedules; if not, it is measured at full depth only.
    """

    name: str
    skips = True

    @abstractmethod
    def prepare(self, batch: int, prompt: int, new: int) -> None:
        """Make ready for runs of these sizes; not timed."""

    @abstractmethod
    def decode_seconds(self, schedule: Schedule) -> float:
        """Seconds of the `new` - 1 steps behind the prompt, all of the batch's rows in each."""


class _Shifted:
    """A budget policy whose schedule may be changed between runs; the token at position 0 counts as the prompt's last.

    All schedules must have one drop order.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.now = Schedule.full(schedule.num_layers)

    def prompt_budget(self) -> int:
        return self.schedule.num_layers

    def first_budget(self) -> int:
        return self.schedule.num_layers

    def next_budget(self, row: RowView) -> int:
        return self.now.budget(row.position - 1) if row.position else self.schedule.num_layers


class EnginePeer(Peer):
    """The package's own engine."""

    name = "fast"

    def __init__(self, model: Any) -> None:
        try:
            self._model = FastModel(model)
        except UnfitModelError as e:
            raise UsageError(f"the engine 'fast' does not cover this model: {e}; leave it out of --engines") from None
        self._policy = _Shifted(_bottom_up(self._model.num_layers))

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self._policy.now = Schedule.full(self._model.num_layers)
        engine = Engine(self._model, self._policy, max_rows=batch)
        text = torch.randint(5, min(1000, self._model.vocab_size), (batch, prompt - 1)).tolist()
        engine.submit([Request(tuple(row), new + 1) for row in text])
        # The step that ends the last prompt also feeds every row's first new token: the prompt's last, as counted here.
        while engine.stats.steps == 0:
            engine.step()
        self._engine = engine

    def decode_seconds(self, schedule: Schedule) -> float:
        self._policy.now = schedule
        with torch.inference_mode():
            engine = copy.deepcopy(self._engine, {id(o): o for o in (self._model, self._policy)})
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        return time.perf_counter() - start


def _bottom_up(layers: int) -> Schedule:
    """The paper's drop order, all the way down."""
    return Schedule.constant(layers, min(2, layers))


class TransformersPeer(Peer):
    """transformers' `generate` with its dynamic cache, untouched, at full depth."""

    name = "transformers"
    skips = False

    def __init__(self, model: Any) -> None:
        self._model = model

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self._ids = torch.full((batch, prompt), 5, device=self._model.device)
        self._new = new

    def decode_seconds(self, schedule: Schedule) -> float:
        return self._generate(self._filled(DynamicCache(config=self._model.config)))

    @torch.inference_mode()
    def _filled(self, cache: Any) -> Any:
        """`cache` with all of the prompt but its last token."""
        self._model(self._ids[:, :1], past_key_values=cache, use_cache=True)
        more = self._ids.shape[1] - 2
        for index, layer in enumerate(cache.layers):
            if more:
                cache.update(*(part.expand(-1, -1, more, -1) for part in (layer.keys, layer.values)), index)
        return cache

    def _generate(self, cache: Any) -> float:
        clock = _Clock(self._ids.device)
        self._model.generate(
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
        return sum(after - before for before, after in pairwise(clock.times))


class GatedPeer(TransformersPeer):
    """transformers' `generate` on the gated model, under the schedule."""

    name = "gated"
    skips = True

    def decode_seconds(self, schedule: Schedule) -> float:
        with attach(self._model, schedule) as attachment:
            cache = self._filled(attachment.new_cache())
            cache.advance([PROMPT] * (self._ids.shape[1] - 2))
            return self._generate(cache)


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time after every token."""

    def __init__(self, device: torch.device) -> None:
        self.times: list[float] = []
        self._device = device

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        synchronize(self._device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


_CLASSES: tuple[Any, ...] = (EnginePeer, TransformersPeer, GatedPeer)
PEERS = tuple(c.name for c in _CLASSES)


def make_peer(name: str, model: Any) -> Peer:
    """A peer by name; raises UsageError for a name that is not known or does not cover the model."""
    for kind in _CLASSES:
        if kind.name == name:
            return kind(model)  # type: ignore[no-any-return]
    raise UsageError(f"engine {name!r} is not known: accepted are {', '.join(PEERS)}")
