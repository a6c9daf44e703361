"""Charts with matplotlib (extra `plot`), which is imported when a chart is drawn; as PNG.

A chart has named series of points with bounds. Knows nothing about runs or files.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skipdecode.common.files import write_whole
from skipdecode.common.progress import note
from skipdecode.errors import MissingExtraError

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

# Okabe and Ito's colours, a little darker: colour-blind readers can distinguish them, also on white paper.
COLORS = ("#0b6fae", "#c8501e", "#0a8f6a", "#a8508a", "#a37a00", "#3d97c4", "#6b5bb5", "#5a6673")
INK, GRID, LEFT_OUT = "#1d2733", "#d5dbe1", "#e6e8e4"
_STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
}
_MARKS = "os^Dv*PXph<>"
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.6)), (0, (5, 1.6, 1, 1.6)))


# ---------------------------------------------------------------------- figures


def check_matplotlib() -> None:
    """Raise MissingExtraError if matplotlib is not installed; for a check before long work."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError("a picture", "plot") from None


def styled() -> Any:
    """The context with this package's style, for making, drawing and saving figures."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, size in inches; raises MissingExtraError without matplotlib."""
    check_matplotlib()
    from matplotlib.figure import Figure

    with styled():
        # pyplot would need a window system and has global state.
        return Figure(figsize=(width, height), dpi=150, layout="constrained")


def try_picture(path: Path, make_figure: Callable[[], Any]) -> None:
    """Write a figure as a PNG file, or print a note if matplotlib is not installed."""
    try:
        write_whole(path, png(make_figure()))
    except MissingExtraError as error:
        note(f"no picture: {error}")


def save_charts(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts that have points side by side, as `try_picture` does; without points, print a note instead."""
    drawn = [chart for chart in charts if any(series.points for series in chart.series)]
    if not drawn:
        note(f"no picture {path}: there are no points to draw")
        return
    try_picture(path, lambda: chart_figure(drawn, size=(6.4, 4.2)))


def png(figure: Any) -> bytes:
    """The figure as a PNG on a white background."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


# ---------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Point:
    """A value with its bounds (low and high), if they are known, and a text beside it."""

    x: float
    y: float
    x_bounds: tuple[float, float] | None = None
    y_bounds: tuple[float, float] | None = None
    label: str = ""


@dataclass(frozen=True)
class Series:
    """Points that are joined from left to right.

    Parameters
    ----------
    name : str
        The name in the legend.
    line : {"-", ":", ""}, optional
        The line between the points; default: by the name's style.
    markers : bool
        Draw the points.
    """

    name: str
    points: Sequence[Point]
    line: str | None = None
    markers: bool = True


@dataclass(frozen=True)
class Chart:
    """The content of a chart.

    Parameters
    ----------
    level : (value, low, high, name), optional
        A horizontal line with a band.
    least : float, optional
        The y axis begins here or above.
    """

    series: Sequence[Series]
    xlabel: str
    ylabel: str
    title: str = ""
    level: tuple[float, float, float, str] | None = None
    least: float | None = None


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by key, keys in the order of their first item."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def styles_of(charts: Sequence[Chart]) -> dict[str, dict[str, Any]]:
    """The style of each series name, as options of matplotlib's `plot`; the same in all of the charts."""
    names = dict.fromkeys(one.name for chart in charts for one in chart.series)
    return {
        name: {
            "color": COLORS[i % len(COLORS)],
            "marker": _MARKS[i % len(_MARKS)],
            "linestyle": _DASHES[i // len(COLORS) % len(_DASHES)],
        }
        for i, name in enumerate(names)
    }


def chart_figure(charts: Sequence[Chart], *, columns: int = 3, size: tuple[float, float] = (3.5, 2.9)) -> Any:
    """The charts in one figure, each of this size in inches, with one legend below them."""
    styles = styles_of(charts)
    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    # An entry of the legend: a stroke of 40 points and, in the mean, 4.7 points for a letter.
    entry = 40 + 4.7 * max(map(len, styles), default=0)
    entries = max(1, min(columns * 2, int(columns * size[0] * 72 / entry)))
    lines = -(-len(styles) // entries)
    figure = new_figure(columns * size[0], rows * size[1] + (0.2 * lines + 0.2 if len(styles) > 1 else 0))
    with styled():
        places = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, chart in zip(places, charts, strict=False):
            draw_chart(axes, chart, styles)
        for axes in places[len(charts) :]:
            axes.remove()
        shown: dict[str, Any] = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                shown.setdefault(label, handle)
        if len(shown) > 1:
            place = {"loc": "outside lower center", "ncols": entries, "fontsize": 8}
            figure.legend(list(shown.values()), list(shown), **place)
    return figure


def draw_chart(axes: Any, chart: Chart, styles: dict[str, dict[str, Any]]) -> None:
    """Draw a chart on matplotlib axes, each series in the style of its name."""
    axes.grid(axis="y")
    if chart.level is not None:
        value, low, high, name = chart.level
        axes.axhspan(low, high, color=INK, alpha=0.08, linewidth=0)
        axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=name)
    for one in chart.series:
        _draw(axes, one, styles[one.name])
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel, title=chart.title)
    axes.margins(x=0.06, y=0.1)
    if chart.least is not None:
        axes.set_ylim(bottom=max(chart.least, axes.get_ylim()[0]) if chart.least else 0)
    axes.locator_params(axis="x", nbins=5)


def _draw(axes: Any, series: Series, style: dict[str, Any]) -> None:
    points = sorted(series.points, key=lambda p: p.x)
    x, y = [p.x for p in points], [p.y for p in points]
    if series.line is not None:
        style = style | {"linestyle": series.line or "none"}
    style = style | {"marker": style["marker"] if series.markers else ""}
    axes.plot(x, y, markersize=5, markeredgewidth=0, linewidth=1.4, label=series.name, **style)
    if any(p.x_bounds or p.y_bounds for p in points):
        errors = {"xerr": _errors(x, [p.x_bounds for p in points]), "yerr": _errors(y, [p.y_bounds for p in points])}
        axes.errorbar(x, y, **errors, fmt="none", ecolor=style["color"], elinewidth=0.7)
    for point in points:
        axes.annotate(point.label, (point.x, point.y), (5, 5), textcoords="offset points", fontsize=7)


def _errors(values: Sequence[float], bounds: Sequence[tuple[float, float] | None]) -> list[list[float]]:
    """Distances below and above each value; NaN if the bounds are unknown."""
    pairs = [
        (math.nan, math.nan) if b is None else (max(0.0, value - b[0]), max(0.0, b[1] - value))
        for value, b in zip(values, bounds, strict=True)
    ]
    return [[low for low, _ in pairs], [high for _, high in pairs]]
