"""Pictures as PNG: losses of a tuning, what schedules keep. With matplotlib (extra `plot`)."""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skipdecode.common.files import write_whole
from skipdecode.common.progress import note
from skipdecode.errors import MissingExtraError
from skipdecode.evaluation.compare import Row, measured

# Okabe and Ito's colours, a little darker: colour-blind readers can distinguish them, also on white paper.
_COLORS = ("#0b6fae", "#c8501e", "#0a8f6a", "#a8508a", "#a37a00", "#3d97c4", "#6b5bb5", "#5a6673")
_STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "legend.frameon": False,
}
_INCHES = (6.4, 4.2)  # of a chart
_WINDOW = 15
_KEPT = "worst score, % of full depth's best"
_LABEL_STEPS, _LABEL_HEIGHT = 8, 9  # positions of a label above its point, and points from one to the next


class Point(NamedTuple):
    """A value with its bounds (low and high), if they are known, and a text beside it."""

    x: float
    y: float
    bounds: tuple[float, float] | None = None
    label: str = ""


class Series(NamedTuple):
    """Points that are joined from left to right, with their name in the legend and matplotlib's format of the line."""

    name: str
    points: Sequence[Point]
    line: str = "o-"


class Chart(NamedTuple):
    """The content of a chart; `level` is a horizontal line: its value and name."""

    series: Sequence[Series]
    xlabel: str
    ylabel: str
    title: str = ""
    level: tuple[float, str] | None = None


def save_charts(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts that have points side by side; without points, or without matplotlib, print a note instead."""
    drawn = [chart for chart in charts if any(series.points for series in chart.series)]
    try:
        if drawn:
            write_whole(path, charts_png(drawn))
        else:
            note(f"no picture {path}: there are no points to draw")
    except MissingExtraError as error:
        note(f"no picture: {error}")


def charts_png(charts: Sequence[Chart]) -> bytes:
    """The charts side by side in one picture, with one legend below; raises MissingExtraError."""
    try:
        import matplotlib
        from matplotlib.figure import Figure  # pyplot would need a window system and has global state
    except ImportError:
        raise MissingExtraError("a picture", "plot") from None
    width, height = _INCHES[0] * len(charts), _INCHES[1]
    names = list(dict.fromkeys(series.name for chart in charts for series in chart.series))
    styles = {name: (_COLORS[i % len(_COLORS)], "os^D"[i // len(_COLORS) % 4]) for i, name in enumerate(names)}
    # An entry of the legend: a stroke of 40 points and, in the mean, 4.7 points for a letter.
    entries = max(1, int(width * 72 / (40 + 4.7 * max(map(len, names)))))
    buffer, shown = io.BytesIO(), dict[str, Any]()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _draw(axes, chart, styles)
            handles, labels = axes.get_legend_handles_labels()
            shown |= zip(labels, handles, strict=True)
        if len(shown) > 1:
            figure.legend(shown.values(), shown, loc="outside lower center", ncols=entries, fontsize=8)
        spread_labels(figure)
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Any, chart: Chart, styles: Mapping[str, tuple[str, str]]) -> None:
    axes.grid(axis="y", alpha=0.5)
    if chart.level is not None:
        value, name = chart.level
        axes.axhline(value, color="black", linewidth=0.9, linestyle="--", label=name)
    for series in chart.series:
        points = sorted(series.points, key=lambda point: point.x)
        color, mark = styles[series.name]
        form = series.line.replace("o", mark)
        axes.plot([p.x for p in points], [p.y for p in points], form, color=color, label=series.name)
        for x, y, bounds, label in points:
            if bounds is not None:
                axes.vlines(x, *bounds, color=color, linewidth=0.7)
            if label:
                axes.annotate(label, (x, y), (5, 5), textcoords="offset points", fontsize=7)
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel, title=chart.title)
    axes.margins(x=0.15, y=0.12)


def spread_labels(figure: Any) -> None:
    """Move labels of points that would overprint, each to the nearest free height above its point, or else below."""
    figure.draw_without_rendering()  # which lays out the axes
    heights = [*range(5, 5 + _LABEL_STEPS * _LABEL_HEIGHT, _LABEL_HEIGHT)]
    heights += [-height for height in heights]
    for axes in figure.axes:
        taken: list[Any] = []
        for label in axes.texts:
            for height in heights:
                label.set_position((5, height))
                box = label.get_window_extent()
                if not any(box.overlaps(other) for other in taken):
                    break
            taken.append(box)


def loss_chart(rows: Sequence[Row], title: str) -> Chart:
    """Cross-entropy by step, from a tuning log: the running mean of training steps, and each schedule on the dev set.

    `rows` have ``kind`` ("train" or "dev"), ``step``, ``cross_entropy``, and of kind dev the losses by schedule name.
    """
    train, dev = ([r for r in rows if r["kind"] == kind] for kind in ("train", "dev"))
    losses = [r["cross_entropy"] for r in train]
    means = [Point(r["step"], statistics.fmean(losses[max(0, i - _WINDOW) : i])) for i, r in enumerate(train, start=1)]
    series = [Series(f"train, mean of {_WINDOW} steps", means, "-")] if train else []
    schedules = list(dict.fromkeys(name for r in dev for name in r if name not in ("kind", "step", "cross_entropy")))
    several = {name: f"dev, {name}" for name in schedules}
    for name, label in (several if len(several) > 1 else {"cross_entropy": "dev"}).items():
        if points := [Point(r["step"], r[name]) for r in dev if name in r]:
            series.append(Series(label, points))
    return Chart(series, "optimizer step", "cross-entropy per token", title)


def kept_charts(rows: Sequence[Row], by_minutes: Mapping[float, float | None], target: str, model: str) -> list[Chart]:
    """What is kept at each request speed-up, and what the schedule `target` keeps after each number of minutes.

    A line begins at the full depth of its checkpoint. Charts without a measured point are left out, and the minutes if
    only one number of them was tried.
    """
    lines = []
    for minutes in dict.fromkeys(float(row["minutes"]) for row in rows):
        shown = [row for row in rows if row["minutes"] == minutes]
        state = f"after {minutes:g} minutes" if minutes else "not tuned"
        points = [(row, _point(row, 100 * kept)) for row, kept in measured(shown)]
        if quantized := [point for row, point in points if "quantization" in row]:
            lines.append(Series(f"{state}, W8A8 weights", quantized, "o"))
        if schedules := [point for row, point in points if "quantization" not in row]:
            full_depth = [Point(1.0, 100 * row["kept"]) for row in shown if row["full_depth"]][-1:]
            lines.append(Series(state, [*full_depth, *schedules]))
    known = {minutes: 100 * share for minutes, share in by_minutes.items() if share is not None}
    bounds = {float(row["minutes"]): _bounds(row) for row in rows if row["name"] == target}
    after = [Point(minutes, kept, bounds.get(minutes), f"{kept:.0f}%") for minutes, kept in known.items()]
    charts = []
    if lines:
        full = Series("full depth", [Point(1.0, 100.0, label="1.0x, 100%")], "o")
        charts.append(Chart([*lines, full], "speed-up of requests over full depth", _KEPT, f"{model}, by speed-up"))
    if len(after) > 1:
        title = f"{target}, by minutes of choosing layers and tuning"
        charts.append(Chart([Series(target, after)], "minutes", _KEPT, title, level=(100.0, "full depth")))
    return charts


def _point(row: Row, kept: float) -> Point:
    return Point(row["request_speedup"], kept, _bounds(row), f"{row['request_speedup']:.2f}x, {kept:.0f}%")


def _bounds(row: Row) -> tuple[float, float] | None:
    interval = row.get("kept_interval")
    return None if interval is None else (100 * interval["low"], 100 * interval["high"])
