"""Two or more runs on the same records: paired intervals of each against the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.errors import DataError
from skipdecode.evaluation.bootstrap import Comparison, compare
from skipdecode.evaluation.results import Run
from skipdecode.evaluation.scored import scorer_of

__all__ = ["Pair", "compare_runs"]


@dataclass(frozen=True)
class Pair:
    """One metric of two runs.

    Parameters
    ----------
    a, b : str
        Names of the runs.
    metric : str
        What is compared.
    comparison : Comparison
        B against A.
    """

    a: str
    b: str
    metric: str
    comparison: Comparison

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"a": self.a, "b": self.b, "metric": self.metric, **self.comparison.to_dict()}


def compare_runs(
    runs: Sequence[Run], metrics: Sequence[str] = (), *, resamples: int = 1000, seed: int = 0
) -> list[Pair]:
    """Every run against the first, in each metric that both have.

    Parameters
    ----------
    metrics : sequence of str
        Only these; all runs must have them. Default: those in common.

    Raises
    ------
    DataError
        The runs are on different records, were scored with different settings, or lack a metric that was asked for.
    UsageError
        The metric is not known.
    """
    for name in metrics:
        scorer_of(name)
    pairs = []
    for other in runs[1:]:
        first = runs[0]
        if first.data["config"].get("data_sha256") != other.data["config"].get("data_sha256"):
            raise DataError(
                f"{first.path} and {other.path} are on different records: paired intervals need the same data"
            )
        for metric in metrics or [m for m in first.data["metrics"] if m in other.data["metrics"]]:
            _check_signatures(first, other, metric)
            result = compare(
                first.table(metric), other.table(metric), scorer_of(metric), resamples=resamples, seed=seed
            )
            pairs.append(Pair(first.name, other.name, metric, result))
    return pairs


def _check_signatures(first: Run, other: Run, metric: str) -> None:
    for run in (first, other):
        if metric not in run.data["metrics"]:
            raise DataError(f"{run.path} has no {metric}: it has {', '.join(run.data['metrics'])}")
    one, two = (run.data["metrics"][metric]["signature"] for run in (first, other))
    if one != two:
        raise DataError(f"{metric} of {first.path} and {other.path} was scored differently: {one} and {two}")
