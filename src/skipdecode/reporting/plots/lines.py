"""One chart for every curve of this package: points with bounds, joined by lines, a name each; and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skipdecode.reporting.plots.output import COLORS, INK, new_figure, styled, tip

__all__ = ["Chart", "Point", "Series", "bar_figure", "grouped", "line_figure", "panel_figure"]

T = TypeVar("T")
_MARKERS = "os^DvPX*"
_NEAR, _FAR = 5, 17  # points from a mark to its note
_PLACES = tuple(
    (right * _NEAR, up * distance, "left" if right > 0 else "right", "bottom" if up > 0 else "top")
    for distance in (_NEAR, _FAR)
    for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1))
)
_MARK = 3  # half of a mark's width, in points


@dataclass(frozen=True)
class Point:
    """A value with its bounds (low and high), where they are known.

    Parameters
    ----------
    note : str
        Written beside the point.
    tip : str
        Shown when a reader points at it.
    """

    x: float
    y: float
    x_bounds: tuple[float, float] | None = None
    y_bounds: tuple[float, float] | None = None
    note: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Series:
    """Points that belong together, drawn from left to right.

    Parameters
    ----------
    name : str
        Its name in the legend; empty: it has no entry there.
    line : {"-", ":", "--", ""}
        How the points are joined.
    markers : bool
        Draw the points themselves.
    color : int, optional
        Which of the palette's colours; default: the series' place. -1 is the text's colour.
    faint : bool
        Draw it in the background.
    """

    name: str
    points: Sequence[Point]
    line: str = "-"
    markers: bool = True
    color: int | None = None
    faint: bool = False


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Parameters
    ----------
    series : sequence of Series
        At least one with a point.
    level : (value, low, high, name), optional
        A horizontal line with a band.
    diagonal : str
        Name of the line y = x, if it is to be drawn.
    from_zero, log : bool
        Whether the y axis begins at 0, and whether it is logarithmic.
    ticks : sequence of str
        Names of x = 0, 1, 2, … in place of numbers.
    """

    series: Sequence[Series]
    xlabel: str
    ylabel: str
    level: tuple[float, float, float, str] | None = None
    diagonal: str = ""
    from_zero: bool = False
    log: bool = False
    ticks: Sequence[str] = ()


def grouped(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Items of the same name together, names in the order of their first item."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return found


def line_figure(chart: Chart) -> Any:
    """A figure of one chart, its legend above it."""
    names = sum(bool(one.name) for one in chart.series) + (chart.level is not None) + bool(chart.diagonal)
    # Two names a line of the legend: room for more than four lines comes on top.
    figure = new_figure(height=3.3 + 0.18 * max(0, -(-names // 2) - 4))
    with styled():
        axes = figure.subplots()
        _draw_chart(axes, chart)
        if any(text for text in axes.get_legend_handles_labels()[1] if not text.startswith("_")):
            figure.legend(loc="outside upper left", ncols=2)
        _spread_notes(figure, axes, chart)
    return figure


def panel_figure(charts: Sequence[Chart]) -> Any:
    """Charts in one figure, two a row; each names its own lines."""
    height = -(-len(charts) // 2)
    figure = new_figure(13.0, 4.2 * height)
    with styled():
        places = figure.subplots(height, 2, squeeze=False).flatten()
        for axes, chart in zip(places, charts, strict=False):
            _draw_chart(axes, chart)
            if chart.series or chart.diagonal:
                axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
        for axes in places[len(charts) :]:
            axes.remove()
        for axes, chart in zip(places, charts, strict=False):
            _spread_notes(figure, axes, chart)
    return figure


def _draw_chart(axes: Any, chart: Chart) -> None:
    axes.grid(axis="y")
    if chart.level is not None:
        value, low, high, name = chart.level
        axes.axhspan(low, high, color=INK, alpha=0.08, linewidth=0)
        axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=name)
    for place, one in enumerate(chart.series):
        _draw(axes, one, place)
    if chart.diagonal:
        far = max((p.x for s in chart.series for p in s.points), default=1)
        axes.plot([1, far], [1, far], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label=chart.diagonal)
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel)
    axes.margins(x=0.08, y=0.1)
    if chart.log:
        from matplotlib.ticker import MaxNLocator, ScalarFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_locator(MaxNLocator(1))
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)


def _draw(axes: Any, series: Series, place: int) -> None:
    number = place if series.color is None else series.color
    color = INK if number < 0 else COLORS[number % len(COLORS)]
    points = sorted(series.points, key=lambda p: p.x)
    axes.plot(
        [p.x for p in points],
        [p.y for p in points],
        linestyle=series.line or "none",
        marker=_MARKERS[number % len(_MARKERS)] if series.markers else "",
        markersize=5,
        color=color,
        linewidth=0.7 if series.faint else 1.5,
        alpha=0.35 if series.faint else 1,
        label=series.name or "_",
    )
    for p in points:
        if p.x_bounds or p.y_bounds:
            errors = {"xerr": _error(p.x, p.x_bounds), "yerr": _error(p.y, p.y_bounds)}
            axes.errorbar(p.x, p.y, **errors, color=color, capsize=2, linewidth=0.8, capthick=0.8)
        if p.note:
            # `_spread_notes` puts it beside the point.
            axes.annotate(p.note, (p.x, p.y), xytext=(0, 0), textcoords="offset points", fontsize=8, color=color)
        if p.tip:
            # A wide, invisible dot, so that pointing at it is easy.
            (dot,) = axes.plot([p.x], [p.y], "o", color=color, alpha=0, markersize=14)
            tip(dot, p.tip)


def _error(value: float, bounds: tuple[float, float] | None) -> list[list[float]] | None:
    if bounds is None:
        return None
    return [[max(0.0, value - bounds[0])], [max(0.0, bounds[1] - value)]]


def _spread_notes(figure: Any, axes: Any, chart: Chart) -> None:
    """Move the notes off the marks and off each other, each to the first free place; where there is none, up and right.

    The figure must be complete: its layout is computed here.
    """
    if not axes.texts:
        return
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    half = _MARK * figure.dpi / 72
    marks = (axes.transData.transform((p.x, p.y)) for one in chart.series for p in one.points)
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in marks]
    for note in sorted(axes.texts, key=lambda note: note.xy):
        for right, up, horizontal, vertical in (*_PLACES, _PLACES[0]):
            note.set_position((right, up))
            note.set(horizontalalignment=horizontal, verticalalignment=vertical)
            if not any(note.get_window_extent().overlaps(box) for box in taken):
                break
        taken.append(note.get_window_extent())


def bar_figure(names: Sequence[str], values: Sequence[float], xlabel: str) -> Any:
    """Horizontal bars, the first at the top."""
    figure = new_figure(4.7, min(7.0, 0.8 + 0.28 * len(names)))
    with styled():
        axes = figure.subplots()
        axes.grid(axis="x")
        bars = axes.barh(range(len(names)), values, 0.72, color=COLORS[0])
        for bar, name, value in zip(bars, names, values, strict=True):
            tip(bar, f"{name}: {value:.4g}")
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8)
        axes.margins(x=0.12)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(xlabel)
    return figure
