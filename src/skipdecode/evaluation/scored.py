"""Everything a run is scored with, as tables of per-record statistics, and the scores of any part of the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipdecode.errors import UsageError
from skipdecode.evaluation.bootstrap import interval
from skipdecode.evaluation.fidelity import FREE_RUNNING, LIKELIHOOD, TEACHER_FORCED, ratio_score
from skipdecode.evaluation.metrics import METRICS

__all__ = ["Scored", "score_names", "scorer_of"]

Table = NDArray[np.float64]


def score_names() -> tuple[str, ...]:
    """Names of all scores: metrics, fidelity figures and the loss."""
    return (*METRICS.names(), *FREE_RUNNING, *TEACHER_FORCED, *LIKELIHOOD)


def scorer_of(name: str) -> Callable[[Table], float]:
    """From the summed statistics of a metric or fidelity figure to its score; loads no model."""
    if name in FREE_RUNNING | TEACHER_FORCED | LIKELIHOOD:
        return partial(ratio_score, name)
    if name not in METRICS:
        raise UsageError(f"unknown metric {name!r}: accepted are {', '.join(score_names())}")
    score: Callable[[Table], float] = METRICS.get(name).score
    return score


@dataclass(frozen=True)
class Scored:
    """Tables by name, each with the signature of what made it.

    Parameters
    ----------
    tables : mapping of str to ndarray, shape (records, k)
        Statistics.
    signatures : mapping of str to str
        Library, version and settings; of a fidelity figure, its definition.
    """

    tables: Mapping[str, Table]
    signatures: Mapping[str, str]

    def of_record(self, index: int) -> dict[str, list[float]]:
        """The statistics of one record."""
        return {name: table[index].tolist() for name, table in self.tables.items()}

    def scores(self, indices: Sequence[int]) -> dict[str, float]:
        """Every score over some of the records."""
        rows = list(indices)
        return {name: scorer_of(name)(table[rows].sum(axis=0)) for name, table in self.tables.items()}

    def summary(self, *, resamples: int, seed: int) -> dict[str, Any]:
        """Every score with its interval and signature, JSON-ready."""
        found = {}
        for name, table in self.tables.items():
            bounds = interval(table, scorer_of(name), resamples=resamples, seed=seed)
            found[name] = {
                "score": bounds.estimate,
                "interval": bounds.to_dict(),
                "signature": self.signatures[name],
            }
        return found
