"""Depth pictures: layers × generation positions, and how much each layer matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skipdecode.reporting.plots.output import COLORS, INK, LEFT_OUT, new_figure, styled, tip
from skipdecode.schedule import Schedule

__all__ = ["calibration_figure", "depth_figure"]

_RUNS, _BARS = COLORS[0], COLORS[1]


def depth_figure(
    schedule: Schedule, positions: int | None = None, *, title: str = "", size: tuple[float, float] = (8.0, 4.5)
) -> Any:
    """Layers × generation positions.

    Parameters
    ----------
    schedule : Schedule
    positions : int, optional
        Generation positions to show. Default: the schedule's `seq_len`.
    title : str
        Over the picture. Default: the schedule's name.
    size : (float, float)
        Inches.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    figure = new_figure(*size)
    with styled():
        axes = figure.subplots()
        _draw_schedule(axes, schedule, positions)
        axes.set(ylabel="layer", title=title or schedule.name)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=2)
    return figure


def calibration_figure(
    schedule: Schedule,
    importance: Mapping[int, float],
    positions: int | None = None,
    *,
    importance_label: str,
    title: str = "",
) -> Any:
    """How much each layer matters, next to layers × generation positions.

    Parameters
    ----------
    schedule : Schedule
    importance : mapping of int to float
        By layer; layers that it lacks get no bar.
    positions : int, optional
        As in `depth_figure`.
    importance_label : str
        What the bars' length is.
    title : str
        Over the picture. Default: the schedule's name.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
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
        bars.set(ylabel="layer", xlabel=importance_label)
        bars.set_title("importance; at the right the drop order", fontsize=8.5)
        _draw_schedule(grid, schedule, positions)
        grid.set_title(title or schedule.name)
        figure.legend(handles=_legend(), loc="outside lower center", ncols=2)
    return figure


def _draw_schedule(axes: Any, schedule: Schedule, positions: int | None) -> None:
    """Layers × positions."""
    shown = schedule.seq_len if positions is None else max(1, positions)
    ends = [schedule.drop_position(layer) for layer in range(schedule.num_layers)]
    axes.barh(range(schedule.num_layers), shown, 1.0, color=LEFT_OUT)
    widths = [shown if e is None else min(e, shown) for e in ends]
    for layer, bar in enumerate(axes.barh(range(schedule.num_layers), widths, 0.94, color=_RUNS)):
        end = ends[layer]
        tip(bar, f"layer {layer} runs " + ("always" if end is None else f"at the first {end} positions"))
    axes.set(xlim=(0, shown), ylim=(-0.5, schedule.num_layers - 0.5), xlabel="generation position")
    axes.locator_params(integer=True)


def _legend() -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(color=_RUNS, label="runs"), Patch(color=LEFT_OUT, label="left out")]
