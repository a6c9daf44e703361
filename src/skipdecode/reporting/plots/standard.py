"""Pictures of this package's own data: schedules and calibrations, decoding speed, the losses of a tuning run.

All raise MissingExtraError where matplotlib is not installed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from skipdecode.reporting.plots.lines import Chart, Point, Series, grouped, line_figure, panel_figure
from skipdecode.reporting.plots.output import COLORS, INK, LEFT_OUT, new_figure, png, styled, tip
from skipdecode.schedule import Schedule

__all__ = [
    "calibration_figure",
    "depth_figure",
    "importance_of",
    "loss_chart",
    "loss_figure",
    "share_chart",
    "speed_chart",
    "speed_png",
]

_RUNS, _BARS, _STORED = COLORS[0], COLORS[1], COLORS[5]
_WINDOW, _DRAWN = 15, 120
_SPEED_TIP = "{decode_speedup:.2f}x at nominal {nominal_speedup:g}x, {decode_tokens_per_s:.0f} tokens/s"
_Rows = Sequence[Mapping[str, Any]]


# ---------------------------------------------------------------------- depth


def depth_figure(
    schedule: Schedule, positions: int | None = None, *, title: str = "", size: tuple[float, float] = (8.0, 4.5)
) -> Any:
    """Layers × generation positions, and left of them what layers do with prompt tokens.

    Parameters
    ----------
    positions : int, optional
        How many are shown. Default: the schedule's `seq_len`.
    title : str
        Title of the picture. Default: the schedule's name.
    size : (float, float)
        Width and height in inches.
    """
    figure = new_figure(*size)
    with styled():
        axes = figure.subplots()
        _draw_schedule(figure, axes, schedule, positions)
        axes.set(ylabel="layer", title=title or schedule.name)
    return figure


def importance_of(calibration: Mapping[str, Any]) -> tuple[str, dict[int, float]]:
    """How much each layer that was tried matters, and what that is, from a document of `skipdecode calibrate`."""
    if not calibration["rounds"]:
        return "block influence", dict(enumerate(calibration["block_influence"]))
    first = calibration["rounds"][0]
    added = {int(layer): loss - first["base"] for layer, loss in first["losses"].items()}
    return "loss added when it alone is left out", added


def calibration_figure(calibration: Mapping[str, Any], *, title: str = "") -> Any:
    """How much each layer matters, next to layers × generation positions, from a document of `skipdecode calibrate`."""
    schedule = Schedule.from_dict(calibration["schedule"])
    label, importance = importance_of(calibration)
    figure = new_figure(8.0, 4.5)
    with styled():
        bars, grid = figure.subplots(1, 2, sharey=True, width_ratios=(1, 2))
        drawn = bars.barh(list(importance), list(importance.values()), 0.8, color=_BARS)
        for bar, (layer, value) in zip(drawn, importance.items(), strict=True):
            tip(bar, f"layer {layer}: {value:.4g}")
        for rank, layer in enumerate(schedule.drop_order, start=1):
            # In axes' width, so that the numbers stand in one column whatever the bars' scale.
            bars.text(0.99, layer, str(rank), transform=bars.get_yaxis_transform(), ha="right", va="center", fontsize=6)
        bars.margins(x=0.12)
        bars.axvline(0, color=INK, linewidth=0.6)
        bars.set(ylabel="layer", xlabel=label)
        bars.set_title("importance; at the right the drop order", fontsize=8.5)
        _draw_schedule(figure, grid, schedule, None)
        grid.set_title(title or schedule.name)
    return figure


def _draw_schedule(figure: Any, axes: Any, schedule: Schedule, positions: int | None) -> None:
    from matplotlib.patches import Patch

    shown = schedule.seq_len if positions is None else max(1, positions)
    ends = [schedule.drop_position(layer) for layer in range(schedule.num_layers)]
    left, right = -0.13 * shown, -0.02 * shown  # of the strip for the prompt
    for span in ((left, right), (0, shown)):
        axes.axvspan(*span, color=LEFT_OUT, linewidth=0)
    prompts = {_RUNS: (schedule.prompt_layers(), "run"), _STORED: (schedule.projected, "leave keys and values in")}
    for color, (layers, do) in prompts.items():
        # Layers on top of each other are one bar: a page has many pictures, and each bar some letters.
        for _, group in groupby(enumerate(layers), lambda place: place[1] - place[0]):
            block = [layer for _, layer in group]
            low, high, wide = block[0], block[-1], right - left
            (bar,) = axes.barh((low + high) / 2, wide, high - low + 0.94, left, color=color, clip_on=False)
            tip(bar, f"prompt tokens {do} layer{f's {low} to' if high > low else ''} {high}")
    below = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate("prompt", ((left + right) / 2, 0), (0, -4), **below, ha="center", va="top", fontsize=6)
    widths = [shown if e is None else min(e, shown) for e in ends]
    run = [layer for layer, width in enumerate(widths) if width]
    bars = axes.barh(run, [widths[layer] for layer in run], 0.94, color=_RUNS, clip_on=False)
    for layer, bar in zip(run, bars, strict=True):
        end = ends[layer]
        tip(bar, f"layer {layer} runs " + ("always" if end is None else f"at the first {end} positions"))
    axes.set(xlim=(left, shown), ylim=(-0.5, schedule.num_layers - 0.5), xlabel="generation position")
    axes.locator_params(integer=True)
    shades = {"runs": _RUNS, "keys and values alone": _STORED if schedule.projected else None, "left out": LEFT_OUT}
    handles = [Patch(color=color, label=label) for label, color in shades.items() if color]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


# ---------------------------------------------------------------------- speed


def speed_png(rows: _Rows) -> bytes:
    """A `skipdecode bench` document's rows in one PNG.

    Speed-up and share of the limit against nominal speed-up; where they vary, the time of a full-depth step against
    batch and against prompt.
    """
    skipping = {r["engine"] for r in rows if r["nominal_speedup"] > 1}
    scheduled = [r for r in rows if r["engine"] in skipping]
    charts = [speed_chart(scheduled, "decode speed-up (faint: byte bound)"), share_chart(rows)]
    for axis, other, label in (("batch", "prompt", "rows of a batch"), ("prompt", "batch", "prompt tokens of a row")):
        if len({r[axis] for r in rows}) > 1:
            charts.append(Chart(_cost_series(rows, axis, other), label, "ms a step at full depth", from_zero=True))
    return png(panel_figure(charts))


def speed_chart(rows: _Rows, ylabel: str = "decode speed-up") -> Chart:
    """Decode speed-up against nominal, a line an engine and batch, over what the bytes allow (dotted)."""
    series = []
    for name, mine in _by_engine(rows).items():
        tips = [f"{name}: {_SPEED_TIP.format_map(r)}" for r in mine]
        points = [Point(r["nominal_speedup"], r["decode_speedup"], tip=t) for r, t in zip(mine, tips, strict=True)]
        series.append(Series(name, points))
        bounds = [Point(r["nominal_speedup"], r["amdahl_bound"]) for r in mine if "amdahl_bound" in r]
        if bounds:
            series.append(Series("", bounds, ":", markers=False, like=name, faint=True))
    return Chart(series, "nominal speed-up", ylabel, diagonal="nominal")


def share_chart(rows: _Rows) -> Chart:
    """Share of a step's limit that decoding reaches, against nominal speed-up, a line an engine and batch."""
    series = [
        Series(name, [Point(r["nominal_speedup"], 100 * r["roofline_share"]) for r in mine])
        for name, mine in _by_engine(rows).items()
    ]
    return Chart(series, "nominal speed-up", "% of the limit", from_zero=True)


def _cost_series(rows: _Rows, axis: str, other: str) -> list[Series]:
    """Milliseconds of a full-depth step along `axis`, a line for each engine and each value of the other axis."""
    several = len({r[other] for r in rows}) > 1
    full = [r for r in rows if r["nominal_speedup"] == 1]
    lines = grouped(full, lambda r: r["engine"] + (f", {other} {r[other]}" if several else ""))
    points = {name: [Point(r[axis], r["ms_per_step"]) for r in mine] for name, mine in lines.items()}
    return [Series(name, found) for name, found in points.items() if len(found) > 1]


def _by_engine(rows: _Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by engine, batch and (where they differ in it) prompt."""
    several = len({r.get("prompt") for r in rows}) > 1
    return grouped(
        rows, lambda r: f"{r['engine']}, batch {r['batch']}" + (f", prompt {r['prompt']}" if several else "")
    )


# ---------------------------------------------------------------------- tuning


def loss_figure(rows: _Rows) -> Any:
    """`loss_chart` as a figure."""
    return line_figure(loss_chart(rows))


def loss_chart(rows: _Rows) -> Chart:
    """Cross-entropy against step from the rows of a tuning log: a running mean a schedule, and the dev set's losses.

    Parameters
    ----------
    rows : sequence of mapping
        With ``kind`` ("train" or "dev"), ``step`` and ``cross_entropy``; of kind train also ``schedule``.
    """
    train, dev = ([r for r in rows if r["kind"] == kind] for kind in ("train", "dev"))
    steps = Counter(str(r.get("schedule", "train")) for r in train)
    few = {name for name, count in steps.items() if count < _WINDOW and len(steps) > len(COLORS)}
    runs = grouped(
        train, lambda r: "schedules of few steps" if str(r.get("schedule")) in few else r.get("schedule", "train")
    )
    series, drawn = [], math.ceil(2 * _DRAWN / (1 + len(runs)))
    for name, mine in runs.items():
        losses = [(r["step"], r["cross_entropy"]) for r in mine]
        single = losses[:: math.ceil(len(losses) / drawn)]
        series.append(Series("", _points(single), "-", markers=False, like=name, faint=True))
        series.append(Series(name, _points(_smooth(losses, drawn)), "-", markers=False))
    for name in [n for n in runs if any(n in r for r in dev)] or ["cross_entropy"]:
        losses = [(r["step"], r[name]) for r in dev if name in r]
        if losses:
            series.append(Series(f"{name}, dev", _points(losses), ":", like=name if name in runs else ""))
    return Chart(series, "optimizer step", "cross-entropy per response token", log=True)


def _points(pairs: Iterable[tuple[float, float]]) -> list[Point]:
    return [Point(x, y) for x, y in pairs]


def _smooth(pairs: Sequence[tuple[float, float]], drawn: int) -> list[tuple[float, float]]:
    """A running mean over the last `_WINDOW` values, at most `drawn` of them: more are not seen."""
    ends = range(len(pairs), 0, -math.ceil(len(pairs) / drawn))
    windows = [pairs[max(0, end - _WINDOW) : end] for end in reversed(ends)]
    return [(window[-1][0], statistics.fmean(y for _, y in window)) for window in windows]
