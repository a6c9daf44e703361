"""All scores of a run, as tables of per-record statistics: metrics, fidelity to full depth, the loss.

Fidelity measures how close a method is to the same model at full depth, and needs no reference. Free-running figures
compare the two greedy outputs. Teacher-forced figures compare the predictions at each token of the full-depth output
(`skipdecode.evaluation.teacher_forced`). The loss of references comes from the same pass and needs a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from skipdecode.common.bootstrap import Table, ratio_of_sums
from skipdecode.evaluation.metrics import METRICS, check_metric

FIDELITY = {
    "full_depth_agreement": "outputs equal to full depth's, %",
    "token_agreement": "tokens equal to full depth's at the same place, % of the longer output",
    "top1_agreement": "tokens of the full-depth output that the method would choose too, given those before, %",
    "kl": "KL divergence from full depth's next-token distribution, nats a token of its output",
    "copied": "names and numbers of the prompt that the references repeat and the output too, %",
    "loss": "cross-entropy of the record's first reference and its end token, nats a token",
}
"""Figures that are not metrics of a library, with their definitions; all are ratios of sums over records."""
IN_NATS = ("kl", "loss")
"""Lower is better; all other figures are in percent."""


def ratio_score(name: str, total: Table) -> float:
    """A figure of `FIDELITY` from summed rows, shape (2,): percent, or nats."""
    return ratio_of_sums(total) * (1.0 if name in IN_NATS else 100.0)


def free_running(outputs: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> dict[str, Table]:
    """Tables (records, 2) of full_depth_agreement and token_agreement, from tokens of a method and of full depth."""
    exact, tokens = [], []
    for ours, theirs in zip(outputs, full, strict=True):
        exact.append((list(ours) == list(theirs), 1))
        tokens.append((sum(a == b for a, b in zip(ours, theirs, strict=False)), max(len(ours), len(theirs))))
    return {"full_depth_agreement": table_of(exact), "token_agreement": table_of(tokens)}


def table_of(rows: Any) -> Table:
    """Rows (numerator, denominator) as an array, shape (records, 2)."""
    return np.asarray(rows, dtype=np.float64).reshape(-1, 2)


def scorer_of(name: str) -> Callable[[Table], float]:
    """From the summed statistics of a metric or fidelity figure to its score; loads no model.

    Raises UsageError: the name is neither.
    """
    if name in FIDELITY:
        return partial(ratio_score, name)
    score: Callable[[Table], float] = METRICS[check_metric(name, *FIDELITY)].score
    return score
