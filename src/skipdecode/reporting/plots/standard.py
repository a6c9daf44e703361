"""Pictures of this package's own records: decoding speed, and the losses of a tuning run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skipdecode.reporting.plots.lines import Chart, Point, Series, line_figure, panel_figure
from skipdecode.reporting.plots.output import png

__all__ = ["loss_figure", "share_figure", "speed_figure", "speed_png"]

_WINDOW = 15
_Rows = Sequence[Mapping[str, Any]]


def speed_figure(rows: _Rows) -> Any:
    """Decode speed-up against nominal, a line an engine and batch, over what the bytes allow (dotted)."""
    return line_figure(_speed_series(rows), "nominal speed-up", "decode speed-up", diagonal="nominal")


def share_figure(rows: _Rows) -> Any:
    """Share of the read bandwidth that decoding reaches, against nominal speed-up, a line an engine and batch."""
    return line_figure(_share_series(rows), "nominal speed-up", "% of the read bandwidth", from_zero=True)


def speed_png(rows: _Rows) -> bytes:
    """A `skipdecode bench` document's rows in one PNG.

    Speed-up and share of the bandwidth against nominal speed-up; where they vary, the time of a full-depth step against
    batch and against prompt.
    """
    skipping = {r["engine"] for r in rows if r["nominal_speedup"] > 1}
    charts = [
        Chart(
            _speed_series([r for r in rows if r["engine"] in skipping]),
            "nominal speed-up",
            "decode speed-up (faint: byte bound)",
            diagonal="nominal",
        ),
        Chart(_share_series(rows), "nominal speed-up", "% of the read bandwidth", from_zero=True),
    ]
    for axis, other, label in (("batch", "prompt", "rows of a batch"), ("prompt", "batch", "prompt tokens of a row")):
        if len({r[axis] for r in rows}) > 1:
            charts.append(Chart(_cost_series(rows, axis, other), label, "ms a step at full depth", from_zero=True))
    return png(panel_figure(charts))


def _speed_series(rows: _Rows) -> list[Series]:
    series = []
    for color, (name, mine) in enumerate(_engines(rows).items()):
        points = tuple(
            Point(
                r["nominal_speedup"],
                r["decode_speedup"],
                tip=f"{name}: {r['decode_speedup']:.2f}x at nominal {r['nominal_speedup']:g}x, "
                f"{r['decode_tokens_per_s']:.0f} tokens/s",
            )
            for r in mine
        )
        series.append(Series(name, points, color=color))
        bounds = tuple(Point(r["nominal_speedup"], r["amdahl_bound"]) for r in mine if "amdahl_bound" in r)
        if bounds:
            series.append(Series("", bounds, ":", markers=False, color=color, faint=True))
    return series


def _share_series(rows: _Rows) -> list[Series]:
    return [
        Series(name, tuple(Point(r["nominal_speedup"], 100 * r["roofline_share"]) for r in mine))
        for name, mine in _engines(rows).items()
    ]


def _cost_series(rows: _Rows, axis: str, other: str) -> list[Series]:
    """Milliseconds of a full-depth step along `axis`, a line for each engine and each value of the other axis."""
    several = len({r[other] for r in rows}) > 1
    lines: dict[str, list[Point]] = {}
    for r in rows:
        if r["nominal_speedup"] == 1:
            name = r["engine"] + (f", {other} {r[other]}" if several else "")
            lines.setdefault(name, []).append(Point(r[axis], r["ms_per_step"]))
    return [Series(name, tuple(points)) for name, points in lines.items() if len(points) > 1]


def loss_figure(rows: _Rows) -> Any:
    """Cross-entropy against step from the rows of a tuning log: a running mean a schedule, and the dev set's losses.

    Parameters
    ----------
    rows : sequence of mapping
        With ``kind`` ("train" or "dev"), ``step`` and ``cross_entropy``; of kind train also ``schedule``.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    train = [r for r in rows if r["kind"] == "train"]
    dev = [r for r in rows if r["kind"] == "dev"]
    names = list(dict.fromkeys(str(r.get("schedule", "train")) for r in train))
    series = []
    for color, name in enumerate(names):
        mine = [(r["step"], r["cross_entropy"]) for r in train if str(r.get("schedule", "train")) == name]
        series.append(Series("", _points(mine), markers=False, color=color, faint=True))
        series.append(Series(f"{name}, mean of {_WINDOW}", _points(_smooth(mine)), markers=False, color=color))
    for name in [n for n in names if any(n in r for r in dev)] or ["cross_entropy"]:
        found = [(r["step"], r[name]) for r in dev if name in r]
        if found:
            label = f"{name}, dev" if name in names else "dev"
            color = names.index(name) if name in names else -1
            series.append(Series(label, _points(found), "--", color=color))
    return line_figure(series, "optimizer step", "cross-entropy per response token", log=True)


def _engines(rows: _Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by engine, batch and (where they differ in it) prompt."""
    prompts = {r.get("prompt") for r in rows}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for r in rows:
        name = f"{r['engine']}, batch {r['batch']}" + (f", prompt {r['prompt']}" if len(prompts) > 1 else "")
        found.setdefault(name, []).append(r)
    return found


def _points(pairs: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
    return tuple(Point(x, y) for x, y in pairs)


def _smooth(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A running mean over the last `_WINDOW` values."""
    windows = [pairs[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(pairs))]
    return [(window[-1][0], statistics.fmean(y for _, y in window)) for window in windows]
