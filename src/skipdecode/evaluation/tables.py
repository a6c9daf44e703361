"""Runs and comparisons as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.evaluation.bootstrap import Interval
from skipdecode.evaluation.compare import Pair
from skipdecode.evaluation.results import Run

__all__ = ["bounds_text", "metric_names", "pairs_cells", "pairs_table", "runs_cells", "runs_table"]


def metric_names(runs: Sequence[Run]) -> list[str]:
    """Metrics that any run has, in order of first appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.data["metrics"]))


def bounds_text(interval: Interval | None, *, signed: bool = False) -> str:
    """``estimate [low, high]``, or ``-``."""
    if interval is None:
        return "-"
    sign = "+" if signed else ""
    return f"{interval.estimate:{sign}.2f} [{interval.low:{sign}.2f}, {interval.high:{sign}.2f}]"


def runs_cells(runs: Sequence[Run]) -> list[list[str]]:
    """Heading and a row a run: speed, depth, every score with half the width of its interval."""
    names = metric_names(runs)
    rows = [
        ["run", "n", "nominal speed-up", "measured speed-up", "layers/token", "engine", "tokens/s", "seconds", *names]
    ]
    for run in runs:
        speed = run.data.get("speed") or {}
        cells = [
            run.name,
            str(run.data["n"]),
            _number(run.data.get("nominal_speedup")),
            _number(run.measured_speedup),
            _number(speed.get("layers_per_token")),
            str(run.data.get("engine", "-")),
            _number(speed.get("tokens_per_s")),
            _number(speed.get("seconds")),
        ]
        rows.append([*cells, *(_score(run, name) for name in names)])
    return rows


def pairs_cells(pairs: Sequence[Pair]) -> list[list[str]]:
    """Heading and a row a comparison."""
    rows = [["metric", "run A", "run B", "A", "B", "B - A", "B / A"]]
    for pair in pairs:
        c = pair.comparison
        difference, ratio = bounds_text(c.difference, signed=True), bounds_text(c.ratio)
        rows.append([pair.metric, pair.a, pair.b, f"{c.a:.2f}", f"{c.b:.2f}", difference, ratio])
    return rows


def runs_table(runs: Sequence[Run]) -> str:
    """`runs_cells` in Markdown."""
    return _markdown(runs_cells(runs))


def pairs_table(pairs: Sequence[Pair]) -> str:
    """`pairs_cells` in Markdown."""
    return _markdown(pairs_cells(pairs))


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
