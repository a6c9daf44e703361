"""Pictures as PNG, with matplotlib (extra `plot`), which is imported only when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.errors import MissingExtraError
from skipdecode.schedule import Schedule

__all__ = ["calibration_png", "schedule_png"]

_RUNS, _LEFT_OUT, _BARS = "#2f6f9f", "#e9e9e4", "#d1603d"
_INCHES = (8.0, 4.5)
_DPI = 150


def schedule_png(schedule: Schedule, positions: int | None = None, *, title: str = "") -> bytes:
    """Layers × generation positions as a PNG picture.

    Parameters
    ----------
    schedule : Schedule
    positions : int, optional
        Generation positions to show. Default: the schedule's `seq_len`.
    title : str
        Over the picture. Default: the schedule's name.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure = _figure()
    axes = figure.subplots()
    _draw_schedule(axes, schedule, positions)
    axes.set(ylabel="layer", title=title or schedule.name)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False)
    return _png(figure)


def calibration_png(
    schedule: Schedule,
    importance: Mapping[int, float],
    positions: int | None = None,
    *,
    importance_label: str,
    title: str = "",
) -> bytes:
    """How much each layer matters, next to layers × generation positions, as a PNG picture.

    Parameters
    ----------
    schedule : Schedule
    importance : mapping of int to float
        By layer; layers that it lacks get no bar.
    positions : int, optional
        As in `schedule_png`.
    importance_label : str
        What the bars' length is.
    title : str
        Over the picture. Default: the schedule's name.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure = _figure()
    bars, grid = figure.subplots(1, 2, sharey=True, width_ratios=(1, 2))
    bars.barh(list(importance), list(importance.values()), 0.8, color=_BARS)
    for rank, layer in enumerate(schedule.drop_order, start=1):
        # In axes' width, so that the numbers stand in one column whatever the bars' scale.
        bars.text(0.99, layer, str(rank), transform=bars.get_yaxis_transform(), ha="right", va="center", fontsize=6)
    bars.axvline(0, color="black", linewidth=0.6)
    bars.set(ylabel="layer", xlabel=importance_label, title="importance; at the right the drop order")
    bars.title.set_fontsize(8)
    _draw_schedule(grid, schedule, positions)
    grid.set_title(title or schedule.name)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False)
    return _png(figure)


def _draw_schedule(axes: Any, schedule: Schedule, positions: int | None) -> None:
    """Layers × positions."""
    shown = schedule.seq_len if positions is None else max(1, positions)
    ends = [schedule.drop_position(layer) for layer in range(schedule.num_layers)]
    axes.set_facecolor(_LEFT_OUT)
    axes.barh(range(schedule.num_layers), [shown if e is None else min(e, shown) for e in ends], 1.0, color=_RUNS)
    axes.set(xlim=(0, shown), ylim=(-0.5, schedule.num_layers - 0.5), xlabel="generation position")
    axes.locator_params(integer=True)


def speed_png(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Decode speed-up and share of the read bandwidth against nominal speed-up, a line an engine and batch, as a PNG.

    Parameters
    ----------
    rows : sequence of mapping
        The rows of a `skipdecode bench` document.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure = _figure()
    left, right = figure.subplots(1, 2)
    for engine, batch in dict.fromkeys((r["engine"], r["batch"]) for r in rows):
        mine = [r for r in rows if (r["engine"], r["batch"]) == (engine, batch)]
        nominal = [r["nominal_speedup"] for r in mine]
        line = left.plot(nominal, [r["decode_speedup"] for r in mine], "o-", label=f"{engine}, batch {batch}")[0]
        left.plot(nominal, [r["amdahl_bound"] for r in mine], ":", color=line.get_color())
        right.plot(nominal, [r["roofline_share"] for r in mine], "o-", color=line.get_color())
    left.set(xlabel="nominal speed-up", ylabel="decode speed-up (dotted: bound set by bytes)")
    right.set(xlabel="nominal speed-up", ylabel="share of the read bandwidth", ylim=(0, None))
    left.legend(frameon=False)
    return _png(figure)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("a PNG picture", "plot") from None
    # Not through pyplot: no window system, no global state.
    return Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=_RUNS, label="runs"), Patch(color=_LEFT_OUT, label="left out")]


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
