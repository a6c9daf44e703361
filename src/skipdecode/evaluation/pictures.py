"""Pictures of schedules, calibrations and tuning losses; MissingExtraError without matplotlib."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.evaluation.charts import (
    COLORS,
    INK,
    LEFT_OUT,
    Chart,
    Point,
    Series,
    draw_chart,
    grouped,
    new_figure,
    styled,
    styles_of,
)
from skipdecode.evaluation.kept import Row, measured
from skipdecode.schedule import Schedule

_RUNS, _BARS, _STORED = COLORS[0], COLORS[1], COLORS[5]
_WINDOW, _DRAWN = 15, 80
_KEPT = "worst score, % of the model before"
_ALL = (100.0, 100.0, 100.0, "full depth")
_Rows = Sequence[Mapping[str, Any]]


# ---------------------------------------------------------------------- depth


def _importance(calibration: Mapping[str, Any]) -> tuple[str, dict[int, float]]:
    """The importance of each layer that the calibration tried, and what its numbers are."""
    if not calibration["rounds"]:
        return "block influence", dict(enumerate(calibration["block_influence"]))
    first = calibration["rounds"][0]
    added = {int(layer): loss - first["base"] for layer, loss in first["losses"].items()}
    return "loss added by skipping only this layer", added


def calibration_figure(calibration: Mapping[str, Any]) -> Any:
    """Importance of layers, schedule, and loss of a greedy search; from a document of `skipdecode.calibrate`."""
    schedule = Schedule.from_dict(calibration["schedule"])
    label, importance = _importance(calibration)
    losses = Series("loss", [Point(i, found["base"]) for i, found in enumerate(calibration["rounds"])], markers=False)
    search = Chart([losses], "layers skipped", "loss per response token", "search")
    panels = 3 if losses.points else 2
    figure = new_figure(3.5 * panels, 3.9)
    with styled():
        bars, grid, *rest = figure.subplots(1, panels)
        bars.barh(list(importance), list(importance.values()), 0.8, color=_BARS)
        for rank, layer in enumerate(schedule.drop_order, start=1):
            # In units of the axes' width: the numbers are then in one column at any scale of the bars.
            bars.text(0.99, layer, str(rank), transform=bars.get_yaxis_transform(), ha="right", va="center", fontsize=6)
        bars.margins(x=0.12)
        bars.axvline(0, color=INK, linewidth=0.6)
        bars.set(ylabel="layer", xlabel=label, title="importance; drop order at the right")
        bars.set_ylim(-0.5, schedule.num_layers - 0.5)
        _draw_schedule(grid, schedule, max(8, schedule.seq_len))
        grid.set(xlabel="generation position", title=schedule.name)
        for curve in rest:
            draw_chart(curve, search, styles_of([search]))
        _legend(figure, schedule)
    return figure


def _draw_schedule(axes: Any, schedule: Schedule, positions: int) -> None:
    """Draw each set of layers as one outline."""
    shown = max(1, positions)
    left, right = -0.13 * shown, -0.02 * shown  # of the strip for prompt tokens
    for span in ((left, right), (0, shown)):
        axes.axvspan(*span, color=LEFT_OUT, linewidth=0)
    layers = range(schedule.num_layers)
    edges = [layer - 0.5 for layer in range(schedule.num_layers + 1)]
    ends = [schedule.drop_position(layer) for layer in layers]
    widths: dict[str, tuple[float, list[float]]] = {
        "run": (0, [shown if end is None else min(end, shown) for end in ends]),
        "prompt": (left, [right if layer in schedule.prompt_layers() else left for layer in layers]),
        "stored": (left, [right if layer in schedule.projected else left for layer in layers]),
    }
    for what, (baseline, values) in widths.items():
        color = _STORED if what == "stored" else _RUNS
        axes.stairs(values, edges, baseline=baseline, orientation="horizontal", fill=True, color=color, linewidth=0)
    below = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
    axes.annotate("prompt", ((left + right) / 2, 0), (0, -4), **below, ha="center", va="top", fontsize=6)
    axes.set(xlim=(left, shown), ylim=(-0.5, schedule.num_layers - 0.5))
    axes.locator_params(integer=True, nbins=4)


def _legend(figure: Any, schedule: Schedule) -> None:
    from matplotlib.patches import Patch

    shades = {"runs": _RUNS, "only keys and values": _STORED if schedule.projected else None, "skipped": LEFT_OUT}
    handles = [Patch(color=color, label=label) for label, color in shades.items() if color]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)


# ---------------------------------------------------------------------- tuning


def loss_chart(rows: _Rows, title: str) -> Chart:
    """Cross-entropy by step, from a tuning log: the running mean of training steps, and each schedule on the dev set.

    Parameters
    ----------
    rows : sequence of mapping
        With ``kind`` ("train" or "dev"), ``step`` and ``cross_entropy``; kind dev also has losses by schedule name.
    """
    train, dev = ([r for r in rows if r["kind"] == kind] for kind in ("train", "dev"))
    losses = [r["cross_entropy"] for r in train]
    ends = range(len(train), 0, -max(1, math.ceil(len(train) / _DRAWN)))  # more points would not be visible
    means = [Point(train[end - 1]["step"], statistics.fmean(losses[max(0, end - _WINDOW) : end])) for end in ends]
    series = [Series(f"train, mean of {_WINDOW} steps", means, "-", markers=False)] if train else []
    schedules = list(dict.fromkeys(name for r in dev for name in _schedule_losses(r)))
    for name in schedules if len(schedules) > 1 else ["cross_entropy"] if dev else []:
        found = [Point(r["step"], r[name]) for r in dev if name in r]
        series.append(Series(f"dev, {name}" if len(schedules) > 1 else "dev", found))
    return Chart(series, "optimizer step", "cross-entropy per token", title)


def _schedule_losses(row: Mapping[str, Any]) -> dict[str, float]:
    """The losses of a line of kind dev in a tuning log, by schedule name."""
    return {name: loss for name, loss in row.items() if name not in ("kind", "step", "cross_entropy")}


# ---------------------------------------------------------------------- kept


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
        title = f"{target}, by minutes of choosing layers and tuning"
        charts.append(Chart([Series(target, after, "-")], "minutes", _KEPT, title, level=_ALL))
    return charts


def _point(row: Row, kept: float) -> Point:
    return Point(row["request_speedup"], kept, None, _bounds(row), f"{row['request_speedup']:.2f}x, {kept:.0f}%")


def _bounds(row: Row) -> tuple[float, float] | None:
    found = row.get("kept_interval")
    return None if found is None else (100 * found["low"], 100 * found["high"])
