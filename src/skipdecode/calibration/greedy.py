"""The nested drop order: which layer costs least when it goes on top of those already gone. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Round", "greedy_order", "greedy_trials"]

Measure = Callable[[Sequence[tuple[int, ...]]], Sequence[float]]


@dataclass(frozen=True)
class Round:
    """One layer goes: `losses` are those of each layer tried on top of the ones `gone`, `base` that of none."""

    gone: tuple[int, ...]
    base: float
    losses: Mapping[int, float]
    dropped: int

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        losses = {str(layer): loss for layer, loss in self.losses.items()}
        return {"gone": list(self.gone), "base": self.base, "losses": losses, "dropped": self.dropped}


def greedy_order(
    measure: Measure, layers: Sequence[int], drops: int, candidates: int, prior: Mapping[int, float]
) -> list[Round]:
    """Drop `drops` layers one after the other.

    The first round tries every layer. Later ones try the `candidates` layers whose loss rose least when they were last
    tried; a layer that is tried and turns out worse makes room for the next, so none is out for good.

    Parameters
    ----------
    measure : callable
        From sets of layers that are left out to the loss of each.
    layers : sequence of int
        Layers that may go.
    drops : int
        Rounds.
    candidates : int
        Layers tried in a round after the first.
    prior : mapping of int to float
        A cheaper ranking (block influence) that decides between equals, the lowest first.
    """
    rises = dict.fromkeys(layers, 0.0)
    base = measure([()])[0]
    rounds: list[Round] = []
    for number in range(drops):
        gone = tuple(r.dropped for r in rounds)
        ranked = sorted(rises, key=lambda layer: (rises[layer], prior[layer], layer))
        tried = ranked if number == 0 else ranked[:candidates]
        losses = dict(zip(tried, measure([(*gone, layer) for layer in tried]), strict=True))
        rises |= {layer: loss - base for layer, loss in losses.items()}
        best = min(tried, key=lambda layer: (losses[layer], prior[layer], layer))
        rounds.append(Round(gone, base, losses, best))
        del rises[best]
        base = losses[best]
    return rounds


def greedy_trials(layers: int, drops: int, candidates: int) -> int:
    """How many sets `greedy_order` measures, that of none included."""
    return 1 + sum(layers if number == 0 else min(candidates, layers - number) for number in range(drops))
