"""Outputs of methods for every record, full depth's next to them, batch by batch, each row to its own end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from skipdecode.common.journal import KeptValues
from skipdecode.evaluation.methods import Generation, Method
from skipdecode.evaluation.speed import batches, timing_of

__all__ = ["Outputs", "generate_all"]

_MOST_BATCHES = 4
_LEAST_TURNS = 8  # where there are records enough: what an interrupted run keeps is whole turns


@dataclass(frozen=True)
class Outputs:
    """What one method gave: tokens of every record in the order of the prompts, and what each batch took.

    `full` are full depth's tokens, to compare with; empty if it was not run, or for full depth itself.
    """

    tokens: list[list[int]]
    batches: list[Generation]
    full: list[list[int]] = field(default_factory=list)

    def timing(self) -> dict[str, float | None]:
        """JSON-ready sums over the batches, and rates."""
        return timing_of(self.batches)


def generate_all(
    sides: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    kept: KeptValues,
    *,
    batch_size: int,
    max_new_tokens: int,
    eos: set[int],
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Outputs]:
    """Run methods over all prompts; what each gave, in their order.

    `kept` has batches that an earlier, interrupted run
    finished, and takes those of this one; `progress` is told how many records each had.
    """
    tokens: list[list[list[int]]] = [[[] for _ in prompts] for _ in sides]
    taken: list[list[Generation]] = [[] for _ in sides]
    # Rows of several batches' worth go to an engine together, which sorts them into waves.
    rows_at_once = batch_size * max(1, min(_MOST_BATCHES, len(prompts) // (batch_size * _LEAST_TURNS)))
    for number, indices in enumerate(batches([len(p) for p in prompts], rows_at_once)):
        rows, together = [prompts[i] for i in indices], min(batch_size, len(indices))
        done = [Generation(**g) for g in kept.get(f"batch {number}") or ()]
        if not done:
            done = [side.generate(rows, max_new_tokens=max_new_tokens, eos=eos, rows=together) for side in sides]
            kept.put(f"batch {number}", [asdict(g) for g in done])
        for generation, generations, outputs in zip(done, taken, tokens, strict=True):
            generations.append(replace(generation, tokens=[]))
            for index, row in zip(indices, generation.tokens, strict=True):
                outputs[index] = row
        progress(len(indices))
    return [Outputs(*each) for each in zip(tokens, taken, strict=True)]
