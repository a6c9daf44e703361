"""Finished runs side by side: their figures, and paired intervals of each against the first, as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skipdecode.errors import DataError
from skipdecode.evaluation.bootstrap import Interval, Paired, compare
from skipdecode.evaluation.results import Run
from skipdecode.evaluation.scores import scorer_of

__all__ = ["Pair", "compare_runs", "pairs_cells", "pairs_table", "runs_table"]


@dataclass(frozen=True)
class Pair:
    """One metric of two runs, named `a` and `b`; `comparison` is B against A."""

    a: str
    b: str
    metric: str
    comparison: Paired

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the runs' names, the metric, and what `Paired` has: `a` and `b` are the two scores."""
        return {"runs": [self.a, self.b], "metric": self.metric, **asdict(self.comparison)}


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


def runs_table(runs: Sequence[Run]) -> str:
    """A row a run: speed, depth, every score with half the width of its interval."""
    names = list(dict.fromkeys(name for run in runs for name in run.data["metrics"]))
    head = ["run", "n", "nominal speed-up", "measured speed-up", "layers/token", "engine", "tokens/s", "seconds"]
    rows = [[*head, *names]]
    for run in runs:
        data, speed = run.data, run.data.get("speed") or {}
        speedups = (_number(data.get("nominal_speedup")), _number(run.measured_speedup))
        cells = [run.name, str(data["n"]), *speedups, _number(speed.get("layers_per_token"))]
        cells += [str(data.get("engine", "-")), _number(speed.get("tokens_per_s")), _number(speed.get("seconds"))]
        rows.append([*cells, *(_score(run, name) for name in names)])
    return _markdown(rows)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """`pairs_cells` in Markdown."""
    return _markdown(pairs_cells(pairs))


def pairs_cells(pairs: Sequence[Pair]) -> list[list[str]]:
    """Heading and a row a comparison."""
    rows = [["metric", "run A", "run B", "A", "B", "B - A", "B / A"]]
    for pair in pairs:
        c = pair.comparison
        scores = f"{c.a:.2f}", f"{c.b:.2f}"
        rows.append([pair.metric, pair.a, pair.b, *scores, _bounds(c.difference, "+"), _bounds(c.ratio)])
    return rows


def _bounds(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "-"
    return f"{interval.estimate:{sign}.2f} [{interval.low:{sign}.2f}, {interval.high:{sign}.2f}]"


def _score(run: Run, name: str) -> str:
    entry = run.data["metrics"].get(name)
    if entry is None:
        return "-"
    half = (entry["interval"]["high"] - entry["interval"]["low"]) / 2
    return f"{entry['score']:.2f} ± {half:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(lines)
