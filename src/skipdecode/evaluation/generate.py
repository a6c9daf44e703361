"""Outputs of methods for every record, full depth's next to them, batch by batch in turn, each timed.

Taking turns on each batch lets the machine's ups and downs hit all, so the ratio of two is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipdecode.common.journal import KeptValues
from skipdecode.evaluation.bootstrap import Interval, compare
from skipdecode.evaluation.methods.base import Generation, Method

__all__ = ["Outputs", "Side", "Timing", "batches", "generate_all"]

_WARM_UP_TOKENS = 4
_MOST_BATCHES = 4
_LEAST_TURNS = 8  # of each method, where there are records enough: the interval of a speed is over turns


@dataclass
class Timing:
    """Seconds and work of one method, a row a batch: prompt, decoding, positions, tokens fed back, layers they ran.

    Parameters
    ----------
    rows_leave : bool
        See `Method`. If rows leave, decode time is spent on tokens fed back, else on positions of the longest row.
    """

    rows_leave: bool = False
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
        """(batches, 2): seconds of decoding, and the tokens or positions that they were spent on."""
        work = 3 if self.rows_leave else 2
        return np.asarray([(row[1], row[work]) for row in self.rows], dtype=np.float64)

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready sums and rates."""
        prompt, decode, positions, fed, layers = self.total()
        return {
            "seconds": prompt + decode,
            "prompt_seconds": prompt,
            "decode_seconds": decode,
            "positions": positions,
            "fed_tokens": fed,
            "layer_tokens": layers,
            "layers_per_token": layers / fed if fed else None,
            "ms_per_position": 1000 * decode / positions if positions else None,
            "tokens_per_s": fed / decode if decode else None,
        }


@dataclass(frozen=True)
class Side:
    """What one method gave: tokens of every record in the order of the prompts, and the times."""

    tokens: list[list[int]]
    timing: Timing


class Outputs:
    """A method's outputs next to full depth's.

    Attributes
    ----------
    tokens, full : list of list of int
        The method's, and full depth's (empty if it was not run).
    timing, full_timing : Timing
        The times of each.
    """

    def __init__(self, side: Side, full: Side | None) -> None:
        self.tokens, self.timing = side.tokens, side.timing
        self.full = [] if full is None else full.tokens
        self.full_timing = Timing() if full is None else full.timing

    def speedup(self, *, seed: int, resamples: int) -> Interval | None:
        """Full depth's seconds of decoding over the method's, for the same work; the interval is over batches.

        The same work: as many tokens, or where ended rows stay in the batch, as many positions.
        """
        if not self.full_timing.rows:
            return None
        ours, theirs = self.timing.decode_table(), self.full_timing.decode_table()
        if not (ours[:, 1].sum() and theirs[:, 1].sum()):
            return None
        return compare(ours, theirs, _seconds_a_unit, seed=seed, resamples=resamples).ratio

    def speedup_with_prompt(self) -> float | None:
        """The same with the prompt's time, for outputs of the length of full depth's."""
        if not self.full_timing.rows:
            return None
        decode, work = self.timing.decode_table().sum(axis=0)
        full_decode, full_work = self.full_timing.decode_table().sum(axis=0)
        if not (work and full_work):
            return None
        prompt, full_prompt = self.timing.total()[0], self.full_timing.total()[0]
        return float((full_prompt + full_decode) / (prompt + decode / work * full_work))


def batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of records in batches of like length, longest first, so that what does not fit fails at once."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + size] for start in range(0, len(order), size)]


def generate_all(
    model: Any,
    sides: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    kept: KeptValues,
    *,
    batch_size: int,
    max_new_tokens: int,
    eos: set[int],
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Side]:
    """Run methods in turn over all prompts; what each gave, in their order.

    Parameters
    ----------
    sides : sequence of Method
        Full depth among them, unless that is left out.
    kept : KeptValues
        Batches that an earlier, interrupted run finished; takes those that this one finishes.
    progress : callable
        Told after each batch how many records it finished.
    """
    tokens: list[list[list[int]]] = [[[] for _ in prompts] for _ in sides]
    timings = [Timing(side.rows_leave) for side in sides]
    warm = False
    # Rows of several batches' worth go to an engine together, which sorts them into waves.
    rows_at_once = batch_size * max(1, min(_MOST_BATCHES, len(prompts) // (batch_size * _LEAST_TURNS)))
    for number, indices in enumerate(batches([len(p) for p in prompts], rows_at_once)):
        rows = [prompts[i] for i in indices]
        done = [Generation(**g) for g in kept.get(f"batch {number}") or ()]
        if not done:
            for side in () if warm else sides:
                side.generate(model, rows[:batch_size], max_new_tokens=_WARM_UP_TOKENS, eos=set())
            warm = True
            order = [(number + i) % len(sides) for i in range(len(sides))]
            together = min(batch_size, len(rows))
            found = {
                i: sides[i].generate(model, rows, max_new_tokens=max_new_tokens, eos=eos, rows=together) for i in order
            }
            done = [found[i] for i in range(len(sides))]
            kept.put(f"batch {number}", [asdict(g) for g in done])
        for generation, timing, outputs in zip(done, timings, tokens, strict=True):
            timing.add(generation)
            for index, row in zip(indices, generation.tokens, strict=True):
                outputs[index] = row
        progress(len(indices))
    return [Side(*given) for given in zip(tokens, timings, strict=True)]


def _seconds_a_unit(total: NDArray[np.float64]) -> float:
    return float(total[0] / total[1]) if total[1] else 0.0
