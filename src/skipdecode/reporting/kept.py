"""What schedules keep of full depth's scores, and at which speed-up: rows of evaluations, and a chart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from skipdecode.evaluation.metrics import METRICS
from skipdecode.reporting.charts import Chart, Point, Series

__all__ = ["kept_chart", "kept_columns", "minutes_chart", "rows_of", "speedups_that_keep", "with_kept"]

_SHARES = (0.99, 0.98, 0.95)
_FULL_DEPTH = ("base", "full")
_KEPT = "kept of full depth, %"
Row = Mapping[str, Any]


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each schedule in the JSON output of `skipdecode eval`: name, speed-ups, scores (higher is better)."""
    if "runs" in document:
        return [_speeds(run) | _task_scores(run["metrics"]) for run in document["runs"]]
    return [_speeds(row) | _self_scores(row) for row in document["rows"]]


def _speeds(found: Row) -> dict[str, Any]:
    full = found["name"] in _FULL_DEPTH  # a schedule that shortens prompts alone has a nominal speed-up of 1 too
    request, decode = (1.0 if full else found.get(f"measured_speedup{end}") for end in ("_with_prompt", ""))
    return {"name": found["name"], "full_depth": full, "request_speedup": request, "decode_speedup": decode}


def _task_scores(metrics: Mapping[str, Any]) -> dict[str, Any]:
    scores = {name: entry["score"] for name, entry in metrics.items() if name in METRICS}
    return {"copied": metrics.get("copied", {}).get("score"), "scores": scores}


def _self_scores(found: Row) -> dict[str, Any]:
    ratio, obeyed = found["of_base"]["estimate"], found.get("instructions")
    scores = {"1 / perplexity": 100 / ratio} | ({"instructions": 100 * obeyed["followed"]} if obeyed else {})
    return {"perplexity_ratio": ratio, "scores": scores}


def with_kept(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with the share of full depth's scores that each keeps: the smallest over all scores.

    If there are several rows of full depth, a score is compared with the best of them. Scores that are 0 at full depth
    do not count; without any other, `kept` is None.
    """
    full = [row["scores"] for row in rows if row["full_depth"]]
    best = {name: max(scores.get(name, 0.0) for scores in full) for name in full[0]}
    best = {name: score for name, score in best.items() if score}
    return [{**row, "kept": min((row["scores"][n] / score for n, score in best.items()), default=None)} for row in rows]


def speedups_that_keep(rows: Sequence[Row]) -> dict[str, float | None]:
    """The largest request speed-up that keeps 99%, 98% and 95%, of rows of one checkpoint; None if there is none.

    Linear between measured speed-ups, from the checkpoint's own full depth on, which is the last row of full depth.
    """
    own = [(1.0, row["kept"]) for row in rows if row["full_depth"] and row["kept"] is not None][-1:]
    measured = [*own, *sorted(point for point in _points(rows) if point[0] > 1)]
    return {f"{share:.0%}": _speedup_that_keeps(measured, share) for share in _SHARES}


def _speedup_that_keeps(measured: Sequence[tuple[float, float]], share: float) -> float | None:
    found = [speedup for speedup, kept in measured if kept >= share]
    for (slow, more), (fast, less) in pairwise(measured):
        if more >= share > less:
            found.append(slow + (fast - slow) * (more - share) / (more - less))
    return round(max(found), 3) if found else None


def kept_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Columns of a table of the rows, with their formats."""
    return {
        "schedule": "{name}",
        "minutes": "{minutes:g}",
        "request": "{request_speedup:.2f}x",
        "decode": "{decode_speedup:.2f}x",
        "kept": "{kept:.1%}",
        "copied": "{copied:.1f}%",
        **{name: f"{{scores[{name}]:.1f}}" for name in rows[0]["scores"]},
    }


def kept_chart(rows: Sequence[Row]) -> Chart:
    """The share that is kept at each request speed-up, with a line for each number of minutes of tuning."""
    series = []
    for minutes in dict.fromkeys(row["minutes"] for row in rows):
        measured = sorted(_points([row for row in rows if row["minutes"] == minutes]))
        name = f"{minutes:g} minutes" if minutes else "fit alone"
        series.append(Series(name, [Point(speedup, 100 * kept) for speedup, kept in measured], "-"))
    return Chart(series, "speed-up of requests", _KEPT)


def minutes_chart(kept: Mapping[str, float | None]) -> Chart:
    """The share that the target keeps after each number of minutes, which are the keys."""
    points = sorted((float(minutes), 100 * share) for minutes, share in kept.items() if share is not None)
    return Chart([Series("target", [Point(*point) for point in points], "-")], "minutes", _KEPT)


def _points(rows: Sequence[Row]) -> Iterator[tuple[float, float]]:
    for row in rows:
        if row["request_speedup"] is not None and row["kept"] is not None and not row["full_depth"]:
            yield row["request_speedup"], row["kept"]
