"""Charts of the scores that schedules keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from skipdecode.evaluation.kept import Row, measured
from skipdecode.reporting.charts import Chart, Point, Series, grouped

_KEPT = "worst score, % of full depth"
_ALL = (100.0, 100.0, 100.0, "full depth")


def kept_charts(rows: Sequence[Row], by_minutes: Mapping[float, float | None], target: str, model: str) -> list[Chart]:
    """What is kept at each request speed-up, and what the schedule `target` keeps after each number of minutes.

    A line begins at the full depth of its checkpoint. Charts without a measured point are left out, and the minutes if
    only one number of them was tried.
    """
    lines = []
    for minutes, found in grouped(rows, lambda row: float(row["minutes"])).items():
        if schedules := [_point(row, 100 * kept) for row, kept in measured(found)]:
            own = [Point(1.0, 100 * row["kept"]) for row in found if row["full_depth"]][-1:]
            lines.append(Series(f"after {minutes:g} minutes" if minutes else "not tuned", [*own, *schedules], "-"))
    known = {minutes: 100 * share for minutes, share in by_minutes.items() if share is not None}
    bounds = {float(row["minutes"]): _bounds(row) for row in rows if row["name"] == target}
    after = [Point(minutes, kept, None, bounds.get(minutes), f"{kept:.0f}%") for minutes, kept in known.items()]
    charts = []
    if lines:
        full = Series("full depth", [Point(1.0, 100.0, label="1.0x, 100%")], "")
        charts.append(Chart([*lines, full], "speed-up of requests over full depth", _KEPT, f"{model}, by speed-up"))
    if len(after) > 1:
        title = f"{target}, by minutes of order, fit and tuning"
        charts.append(Chart([Series(target, after, "-")], "minutes", _KEPT, title, level=_ALL))
    return charts


def _point(row: Row, kept: float) -> Point:
    return Point(row["request_speedup"], kept, None, _bounds(row), f"{row['request_speedup']:.2f}x, {kept:.0f}%")


def _bounds(row: Row) -> tuple[float, float] | None:
    found = row.get("kept_interval")
    return None if found is None else (100 * found["low"], 100 * found["high"])
