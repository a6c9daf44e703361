"""Times decode steps and prompts of a backend's engines.

The time of a decode step depends on how many tokens the cache holds, not on their values. Steps are therefore timed
behind keys and values that are filled in: to compute those of the prompts would take most of a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, StaticCache

from skipdecode.engine.base import Engine
from skipdecode.engine.batch import TokenRows
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.generate import GenerateEngine
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kv import PagedKV
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request
from skipdecode.models.plan import PROMPT
from skipdecode.models.release import model_cache_name
from skipdecode.schedule import Schedule

_TOKEN = 5


class Shape(NamedTuple):
    """Sequences that start together: how many, prompt tokens and new tokens of each."""

    batch: int
    prompt: int
    new: int


def open_engine(backend: Backend, schedule: Schedule, shape: Shape) -> Engine:
    """An idle engine for such sequences, whose prompts run in one forward, so that the sequences stay together."""
    backend.step_bytes(shape.batch)  # makes the 8-bit copy of the head: no step is timed with it
    return backend.engine(schedule, max_rows=shape.batch, prompt_tokens=shape.batch * shape.prompt)


def step_seconds(backend: Backend, schedule: Schedule, shape: Shape) -> list[float]:
    """Seconds of each of the `new` - 1 decode steps of all sequences."""
    engine = open_engine(backend, schedule, shape)
    with filled_in(engine, shape):
        return [after - before for before, after in pairwise(token_times(engine, shape))]


def prompt_seconds(backend: Backend, schedule: Schedule, batch: int, prompt: int) -> float:
    """Seconds of the prompts' forward, and of the choice of the first new tokens."""
    shape = Shape(batch, prompt, 1)
    engine = open_engine(backend, schedule, shape)
    engine.decode(_requests(shape))
    return engine.stats.seconds


def token_times(engine: Engine, shape: Shape) -> list[float]:
    """What `time.perf_counter` read when an engine had each token of one of the sequences."""
    first, *_ = engine.submit(_requests(shape))
    times: list[float] = []
    while engine.has_work:
        times += [engine.began + out.seconds for out in engine.step() if out.request == first]
    return times


def _requests(shape: Shape) -> list[Request]:
    return [Request((_TOKEN,) * shape.prompt, shape.new)] * shape.batch


# ---------------------------------------------------------------------- keys and values that are filled in


def filled_in(engine: Engine, shape: Shape) -> AbstractContextManager[None]:
    """While this holds, an engine of this package fills in keys and values of prompts; other engines compute them."""
    if isinstance(engine, FastEngine):
        return replaced([(engine.model, "forward", _filling_forward(engine.model))])
    if isinstance(engine, GatedEngine):
        return replaced([(engine, "_logits", _filling_logits(engine))])
    if isinstance(engine, GenerateEngine):
        return replaced([(engine, "_options", _filled_cache(engine._model, shape, dict(engine._options)))])
    return nullcontext()


def _filling_forward(model: Any) -> Callable[[TokenRows, PagedKV], torch.Tensor | Candidates]:
    """The forward of a fast model; prompts leave zeros."""
    forward = model.forward

    def filling(rows: TokenRows, kv: PagedKV) -> Any:
        if rows.wanted == len(rows.tokens):
            return forward(rows, kv)
        kv.fill()
        return torch.zeros(rows.wanted, model.vocab_size)

    return filling


def _filling_logits(engine: Any) -> Callable[[Any], torch.Tensor]:
    """The forward of a gated engine; prompts leave the keys and values of their first token, repeated."""
    logits = engine._logits

    def filling(batch: Any) -> torch.Tensor:
        if batch.position:
            return logits(batch)  # type: ignore[no-any-return]
        ids, mask = batch.ids, batch.mask
        batch.ids, batch.mask = ids[:, :1], mask[:, :1]
        found: torch.Tensor = logits(batch)
        batch.ids, batch.mask = ids, mask
        _repeat_first(batch.cache, ids.shape[1] - 1)
        batch.cache.advance([PROMPT] * (ids.shape[1] - 1))
        return found

    return filling


@torch.inference_mode()
def _filled_cache(model: Any, shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `generate` with a cache that holds all of the prompts but their last tokens."""
    cache: Any = DynamicCache(config=model.config)
    if options.pop("cache_implementation", None) == "static":
        cache = StaticCache(config=model.config, max_cache_len=shape.prompt + shape.new)
    name = model_cache_name(model)
    model(torch.full((shape.batch, 1), _TOKEN, device=model.device), use_cache=True, **{name: cache})
    _repeat_first(cache, shape.prompt - 2)
    return options | {name: cache}


def _repeat_first(cache: Any, times: int) -> None:
    """Append the keys and values of the one token that a cache holds."""
    for index, layer in enumerate(cache.layers):
        if times:
            first = (part[:, :, :1].expand(-1, -1, times, -1) for part in (layer.keys, layer.values))
            cache.update(*first, index)


@contextmanager
def replaced(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """While this holds, each (object, attribute) gives the value instead of what is there."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, held in before:
            if held is None:
                delattr(owner, name)  # the class's method shows again
            else:
                setattr(owner, name, held)
