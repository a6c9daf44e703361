"""What the fast path's steps and prompts cost on the machine at hand, for the simulator: forwards on made-up tokens.

A forward takes the same time whatever is in the cache, so no prompt is computed first: pages are handed out and left at
zero. Kinds of forwards take turns, round after round, so that a change of the machine's speed meets all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from skipdecode.decoding.batch_cost import BatchCost
from skipdecode.decoding.fast_model import FastModel, TokenRows
from skipdecode.decoding.requests import Sampling
from skipdecode.decoding.sampling import RowSampler, choose
from skipdecode.errors import UsageError

__all__ = ["probe_cost"]

_SHORT, _LONG = 32, 288  # cached tokens of a row
_PROMPTS = (16, 64, 128, 256, 512)


class _Kind(NamedTuple):
    """Forwards of `rows` rows of `tokens` tokens each, behind `cached` tokens, through the first `layers` layers."""

    rows: int
    layers: int
    cached: int
    tokens: int = 1


@torch.inference_mode()
def probe_cost(
    model: FastModel, max_rows: int, *, prompt_len: int = 32, rounds: int = 7, batches: Sequence[int] = ()
) -> BatchCost:
    """Measure a `BatchCost` for 1 to `max_rows` rows; a few seconds for a small model.

    Parameters
    ----------
    model : FastModel
    max_rows : int
        Most rows of a step.
    prompt_len : int
        Tokens of one prompt among those of a prompts' forward.
    rounds : int
        Forwards of each kind; the median counts, the first round warms up.
    batches : sequence of int, optional
        Numbers of rows to measure; those between are interpolated. Default: 1, 2, 4, 8, 12, 16, 24, 32, 48, ...

    Raises
    ------
    UsageError
        If a number is below 1, or the model has one layer only.
    """
    for name, value in (("max_rows", max_rows), ("prompt_len", prompt_len), ("rounds", rounds)):
        if value < 1:
            raise UsageError(f"{name}={value} is not accepted: give 1 or more")
    deep, shallow = model.num_layers, max(1, model.num_layers // 3)
    if deep == shallow:
        raise UsageError("a model of one layer has nothing to skip: give a model with 2 layers or more")
    counts = sorted({n for n in batches or _default_batches(max_rows) if n <= max_rows} | {max_rows})
    model.ensure_positions(_LONG + 1)
    kinds = [_Kind(n, depth, _SHORT) for n in counts for depth in (deep, shallow)]
    kinds += [_Kind(n, deep, _LONG) for n in counts]
    prompts = {n: _Kind(max(1, n // prompt_len), deep, 0, min(n, prompt_len)) for n in _PROMPTS}
    seconds = _timed(model, [*kinds, *prompts.values()], rounds)
    steps = {}
    for n in counts:
        full, third, long = (seconds[_Kind(n, *each)] for each in ((deep, _SHORT), (shallow, _SHORT), (deep, _LONG)))
        kv = max(0.0, (long - full) / (deep * n * (_LONG - _SHORT)))
        each = (full - third) / (deep - shallow)
        # A step at position p reads p + 1 tokens.
        layer = max(0.0, each - kv * n * (_SHORT + 1))
        steps[n] = (max(0.0, full - deep * each), layer, kv)
    fixed = steps[counts[0]][0]
    by_tokens = {n: max(0.0, seconds[kind] - fixed) / deep for n, kind in prompts.items()}
    return BatchCost.measured(deep, steps, by_tokens)


def _default_batches(max_rows: int) -> list[int]:
    return [1, 2, 4, 8, 12, 16, 24, *range(32, max_rows + 1, 16)]


def _timed(model: FastModel, kinds: Sequence[_Kind], rounds: int) -> dict[_Kind, float]:
    """Median seconds of a forward of each kind, with the choice of tokens."""
    kv = model.new_kv()
    most = max(kind.rows for kind in kinds)
    pages = max(kind.rows * kv.pages_for(kind.cached + kind.tokens) for kind in kinds) * model.num_layers
    kv.reserve(most, _LONG + max(kind.tokens for kind in kinds), pages)
    kv.pages.zero_()
    found: dict[_Kind, list[float]] = {kind: [] for kind in kinds}
    for attempt in range(rounds + 1):
        for kind, times in found.items():
            slots = [kv.open() for _ in range(kind.rows)]
            for slot in slots:
                kv.extend(slot, range(model.num_layers), kind.cached + kind.tokens)
            batch = _batch(model, kind, slots)
            samplers = [RowSampler(Sampling(), (0,)) for _ in batch.wanted]
            start = time.perf_counter()
            choose(model.forward(batch, kv), samplers)
            if attempt:
                times.append(time.perf_counter() - start)
            for slot in slots:
                kv.close(slot)
    return {kind: statistics.median(times) for kind, times in found.items()}


def _batch(model: FastModel, kind: _Kind, slots: list[int]) -> TokenRows:
    total = kind.rows * kind.tokens
    counts = [total if layer < kind.layers else 0 for layer in range(model.num_layers)]
    return TokenRows(
        [token % model.vocab_size for token in range(total)],
        [slot for slot in slots for _ in range(kind.tokens)],
        [kind.cached + i for _ in slots for i in range(kind.tokens)],
        counts,
        [row * kind.tokens + kind.tokens - 1 for row in range(kind.rows)],
    )
