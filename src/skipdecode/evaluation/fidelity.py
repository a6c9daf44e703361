"""Fidelity: how close a method stays to the same model at full depth. Needs no reference.

Free-running figures compare the two greedy outputs; teacher-forced ones ask at each token of the full-depth output what
the method would have said there (`skipdecode.evaluation.teacher_forced`). The loss of
references comes from the same pass and does need one. All are ratios of sums over records.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FREE_RUNNING", "IN_NATS", "LIKELIHOOD", "TEACHER_FORCED", "free_running", "ratio_score", "table_of"]

Table = NDArray[np.float64]

FREE_RUNNING = {
    "exact_match": "outputs equal to full depth's, %",
    "token_agreement": "tokens equal to full depth's at the same place, % of the longer output",
}
TEACHER_FORCED = {
    "top1_agreement": "tokens of the full-depth output that the method would choose too, given those before, %",
    "kl": "KL divergence from full depth's next-token distribution, nats a token of its output",
}
LIKELIHOOD = {"loss": "cross-entropy of the record's first reference and its end token, nats a token"}
IN_NATS = ("kl", "loss")
"""Less is better; all other figures are percent."""


def ratio_score(name: str, total: Table) -> float:
    """A figure from summed rows, shape (2,): percent, or nats."""
    if not total[1]:
        return 0.0
    return float(total[0] / total[1]) * (1.0 if name in IN_NATS else 100.0)


def free_running(outputs: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> dict[str, Table]:
    """Tables (records, 2) of `FREE_RUNNING` from the tokens of the method's outputs and of full depth's."""
    exact, tokens = [], []
    for ours, theirs in zip(outputs, full, strict=True):
        exact.append((float(list(ours) == list(theirs)), 1.0))
        same = sum(a == b for a, b in zip(ours, theirs, strict=False))
        tokens.append((float(same), float(max(len(ours), len(theirs)))))
    return {"exact_match": table_of(exact), "token_agreement": table_of(tokens)}


def table_of(rows: Any) -> Table:
    """Rows (numerator, denominator) as an array, shape (records, 2)."""
    return np.asarray(rows, dtype=np.float64).reshape(-1, 2)
