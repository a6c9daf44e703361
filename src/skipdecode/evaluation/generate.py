"""Outputs of a method for every record, next to full depth's, batch by batch in turn, each timed.

Alternating the two on each batch lets the machine's ups and downs hit both, so their ratio is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipdecode.evaluation.bootstrap import Interval, compare
from skipdecode.evaluation.kept import Kept
from skipdecode.methods.base import Generation, Method

__all__ = ["Outputs", "Timing", "batches", "generate_all"]

_WARM_UP_TOKENS = 4


@dataclass
class Timing:
    """Seconds and work of one method, a row a batch: prompt, decoding, positions, tokens fed back, layers they ran."""

    rows: list[tuple[float, float, int, int, int]] = field(default_factory=list)

    def add(self, generation: Generation) -> None:
        """Count a batch."""
        g = generation
        self.rows.append((g.prompt_seconds, g.decode_seconds, g.positions, g.fed_tokens, g.layer_tokens))

    def total(self) -> tuple[float, float, float, float, float]:
        """Sums over batches."""
        prompt, decode, positions, fed, layers = (float(sum(column)) for column in zip(*self.rows, strict=True))
        return prompt, decode, positions, fed, layers

    def decode_table(self) -> NDArray[np.float64]:
        """(batches, 2): seconds of decoding, positions."""
        return np.asarray([(decode, positions) for _, decode, positions, _, _ in self.rows], dtype=np.float64)

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready sums and rates."""
        prompt, decode, positions, fed, layers = self.total()
        return {
            "prompt_seconds": prompt,
            "decode_seconds": decode,
            "positions": positions,
            "fed_tokens": fed,
            "layers_per_token": layers / fed if fed else None,
            "ms_per_position": 1000 * decode / positions if positions else None,
            "tokens_per_s": fed / decode if decode else None,
        }


@dataclass
class Outputs:
    """Tokens of every record in the order of the prompts, and the times.

    Parameters
    ----------
    tokens, full : list of list of int
        The method's, and full depth's (empty if it was not run).
    timing, full_timing : Timing
        The same of times.
    """

    tokens: list[list[int]]
    full: list[list[int]]
    timing: Timing
    full_timing: Timing

    def speedup(self, *, seed: int, resamples: int) -> Interval | None:
        """Full depth's seconds a position over the method's, decoding only; the interval is over batches."""
        if not self.full_timing.rows:
            return None
        ours, theirs = self.timing.decode_table(), self.full_timing.decode_table()
        if not (ours[:, 1].sum() and theirs[:, 1].sum()):
            return None
        return compare(ours, theirs, _per_position, seed=seed, resamples=resamples).ratio

    def speedup_with_prompt(self) -> float | None:
        """The same with the prompt's time, for outputs of the length of full depth's."""
        if not self.full_timing.rows:
            return None
        prompt, decode, positions, _, _ = self.timing.total()
        full_prompt, full_decode, full_positions, _, _ = self.full_timing.total()
        if not (positions and full_positions):
            return None
        return (full_prompt + full_decode) / (prompt + decode / positions * full_positions)


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of records in batches of like length, longest first, so that what does not fit fails at once."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + size] for start in range(0, len(order), size)]


def generate_all(
    model: Any,
    sides: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    kept: Kept,
    *,
    batch_size: int,
    max_new_tokens: int,
    eos: set[int],
    progress: Callable[[int], None] = lambda rows: None,
) -> Outputs:
    """Run a method, and full depth next to it, over all prompts.

    Parameters
    ----------
    sides : sequence of Method
        The method, and full depth for fidelity and speed unless that is left out.
    kept : Kept
        Batches that an earlier, interrupted run finished; takes those that this one finishes.
    batch_size : int
        Rows of a batch, for both.
    progress : callable
        Told after each batch how many records it finished.
    """
    tokens: list[list[list[int]]] = [[[] for _ in prompts] for _ in sides]
    timings = [Timing() for _ in sides]
    warm = False
    for number, indices in enumerate(batches([len(p) for p in prompts], batch_size)):
        rows = [prompts[i] for i in indices]
        done = kept.get(number)
        if done is None:
            for side in () if warm else sides:
                side.generate(model, rows, max_new_tokens=_WARM_UP_TOKENS, eos=set())
            warm = True
            turns = list(enumerate(sides)) if number % 2 == 0 else list(enumerate(sides))[::-1]
            found = {i: side.generate(model, rows, max_new_tokens=max_new_tokens, eos=eos) for i, side in turns}
            done = [found[i] for i in range(len(sides))]
            kept.put(number, done)
        for generation, timing, outputs in zip(done, timings, tokens, strict=True):
            timing.add(generation)
            for index, row in zip(indices, generation.tokens, strict=True):
                outputs[index] = row
        progress(len(indices))
    if len(sides) == 1:
        return Outputs(tokens[0], [], timings[0], Timing())
    return Outputs(tokens[0], tokens[1], timings[0], timings[1])


def _per_position(total: NDArray[np.float64]) -> float:
    return float(total[0] / total[1]) if total[1] else 0.0
