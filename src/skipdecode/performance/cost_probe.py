"""What the fast path's steps and prompts cost on the machine at hand, for the simulator: forwards on made-up tokens.

A forward takes the same time whatever is in the cache, so no prompt is computed first: pages are handed out and left at
zero. Kinds of forwards take turns, round after round, so that a change of the machine's speed meets all of them.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from skipdecode.engine.fast_model import FastModel, TokenRows
from skipdecode.engine.requests import Sampling
from skipdecode.engine.sampling import RowSampler, choose
from skipdecode.errors import UsageError
from skipdecode.performance.batch_cost import BatchCost

__all__ = ["CostProbe"]

_SHORT, _LONG = 32, 288  # cached tokens of a row
_PROMPTS = (16, 64, 128, 256, 512)
_BATCHES = (1, 2, 4, 8, 12, 16, 24)


class _Kind(NamedTuple):
    """Forwards of `rows` rows of `tokens` tokens each, behind `cached` tokens, through the first `layers` layers."""

    rows: int
    layers: int
    cached: int
    tokens: int = 1


class CostProbe:
    """Measures a `BatchCost` for 1 to `max_rows` rows; a second or two a round for a small model on a CPU.

    On a machine whose speed changes, run some rounds before and some after what the cost is to explain.

    Parameters
    ----------
    model : FastModel
    max_rows : int
        Most rows of a step.
    prompt_len : int
        Tokens of one prompt among those of a prompts' forward.

    Raises
    ------
    UsageError
        If a number is below 1, or the model has one layer only.
    """

    def __init__(self, model: FastModel, max_rows: int, *, prompt_len: int = 32) -> None:
        for name, value in (("max_rows", max_rows), ("prompt_len", prompt_len)):
            if value < 1:
                raise UsageError(f"{name}={value} is not accepted: give 1 or more")
        self._model = model
        self._deep, self._shallow = model.num_layers, max(1, model.num_layers // 3)
        if self._deep == self._shallow:
            raise UsageError("a model of one layer has nothing to skip: give a model with 2 layers or more")
        model.ensure_positions(_LONG + 1)
        self._counts = sorted({n for n in (*_BATCHES, *range(32, max_rows, 16)) if n < max_rows} | {max_rows})
        kinds = [_Kind(n, depth, _SHORT) for n in self._counts for depth in (self._deep, self._shallow)]
        kinds += [_Kind(n, self._deep, _LONG) for n in self._counts]
        self._prompts = {n: _Kind(max(1, n // prompt_len), self._deep, 0, min(n, prompt_len)) for n in _PROMPTS}
        self._seconds: dict[_Kind, list[float]] = {kind: [] for kind in (*kinds, *self._prompts.values())}
        self._kv = model.new_kv()
        pages = max(kind.rows * self._kv.pages_for(kind.cached + kind.tokens) for kind in self._seconds)
        most = max(kind.rows for kind in self._seconds)
        self._kv.reserve(most, _LONG + prompt_len, pages * model.num_layers)
        self._kv.fill()

    @torch.inference_mode()
    def run(self, rounds: int = 3) -> None:
        """Time forwards of every kind, `rounds` times after a warm-up."""
        for attempt in range(rounds + 1):
            for kind, seconds in self._seconds.items():
                taken = self._forward(kind)
                if attempt:
                    seconds.append(taken)

    def cost(self) -> BatchCost:
        """From the medians of all rounds so far; raises UsageError before the first one."""
        if not all(self._seconds.values()):
            raise UsageError("nothing was timed yet: run a round first")
        seconds = {kind: statistics.median(times) for kind, times in self._seconds.items()}
        deep, shallow = self._deep, self._shallow
        steps = {}
        for n in self._counts:
            full, third, long = (
                seconds[_Kind(n, *each)] for each in ((deep, _SHORT), (shallow, _SHORT), (deep, _LONG))
            )
            kv = max(0.0, (long - full) / (deep * n * (_LONG - _SHORT)))
            each = (full - third) / (deep - shallow)
            # A step at position p reads p + 1 tokens.
            steps[n] = (max(0.0, full - deep * each), max(0.0, each - kv * n * (_SHORT + 1)), kv)
        fixed = steps[self._counts[0]][0]
        prompts = {n: max(0.0, seconds[kind] - fixed) / deep for n, kind in self._prompts.items()}
        return BatchCost.measured(deep, steps, prompts)

    def _forward(self, kind: _Kind) -> float:
        """Seconds of one forward with the choice of tokens."""
        slots = [self._kv.open() for _ in range(kind.rows)]
        for slot in slots:
            self._kv.extend(slot, range(self._deep), kind.cached + kind.tokens)
        batch = _batch(self._model, kind, slots)
        samplers = [RowSampler(Sampling(), (0,)) for _ in batch.wanted]
        start = time.perf_counter()
        choose(self._model.forward(batch, self._kv), samplers)
        taken = time.perf_counter() - start
        for slot in slots:
            self._kv.close(slot)
        return taken


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
