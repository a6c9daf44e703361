"""One chart for every curve of this package: points with bounds, joined by lines, a name each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skipdecode.reporting.plots.output import COLORS, INK, new_figure, styled, tip

__all__ = ["OUTLINES", "Chart", "Point", "Series", "Style", "grouped", "line_figure", "panel_figure"]

T = TypeVar("T")


def _outline(corners: int, inner: float, first: float) -> list[tuple[float, float]]:
    """Corners around 0 from an angle on, every second one `inner` of the others' way out."""
    angles = [math.radians(first) + 2 * math.pi * i / corners for i in range(corners)]
    return [
        ((inner if i % 2 else 1) * math.cos(a), (inner if i % 2 else 1) * math.sin(a)) for i, a in enumerate(angles)
    ]


OUTLINES = [
    _outline(corners, inner, first)
    for corners, inner in ((16, 1), (4, 1), (3, 1), (8, 0.4), (6, 1), (10, 0.5))
    for first in ((0, 45) if corners in (4, 8) else (90, 270) if corners == 3 else (90,))
]
"""The marks: circle, square, triangle, …, each within 1 around 0."""
_DASHES = ((), (5, 2), (1, 1.6), (5, 1.6, 1, 1.6))
_SHADES = (1.0, 0.85, 0.72, 0.6)
_NEAR, _MIDDLE, _FAR = 5, 17, 29  # points from a mark to its note
_PLACES = tuple(
    (right * _NEAR, up * distance, "left" if right > 0 else "right", "bottom" if up > 0 else "top")
    for distance in (_NEAR, _MIDDLE, _FAR)
    for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1))
)
_MARK = 3  # half of a mark's width, in points


@dataclass(frozen=True)
class Point:
    """A value with its bounds (low and high), where they are known.

    Parameters
    ----------
    note : str
        Written beside the point, where there is room.
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
    line : {"-", ":", "--", ""}, optional
        How the points are joined; default: as its style says.
    markers : bool
        Draw the points themselves.
    like : str, optional
        The name whose style it has; default: its own. Empty: the text's colour.
    faint : bool
        Draw it in the background.
    """

    name: str
    points: Sequence[Point]
    line: str | None = None
    markers: bool = True
    like: str | None = None
    faint: bool = False


@dataclass(frozen=True)
class Style:
    """How a curve looks: `color` and `mark` are places in the palettes, `dashes` alternates drawn and left out."""

    color: int
    mark: int
    dashes: tuple[float, ...]
    shade: float


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
    names : sequence of str
        The names that have styles, where several charts share a legend; default: those of the series.
    """

    series: Sequence[Series]
    xlabel: str
    ylabel: str
    level: tuple[float, float, float, str] | None = None
    diagonal: str = ""
    from_zero: bool = False
    log: bool = False
    ticks: Sequence[str] = ()
    names: Sequence[str] = ()

    @property
    def styles(self) -> dict[str, Style]:
        """A hue and a mark by what stands before a name's first comma, a shade and a dash by what follows."""
        names = list(self.names or dict.fromkeys(s.name if s.like is None else s.like for s in self.series))
        heads = grouped([name for name in names if name], lambda name: name.split(",")[0])
        if len(heads) == 1:
            heads = {name: [name] for name in names if name}
        return {
            name: Style(hue % len(COLORS), hue % len(OUTLINES), _DASHES[i % len(_DASHES)], _SHADES[i % len(_SHADES)])
            for hue, variants in enumerate(heads.values())
            for i, name in enumerate(variants)
        }


def grouped(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Items of the same name together, names in the order of their first item."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return found


def line_figure(chart: Chart, *, legend: bool = True, width: float = 4.7) -> Any:
    """A figure of one chart, its legend above it if it is to have one."""
    names = sum(bool(one.name) for one in chart.series) + (chart.level is not None) + bool(chart.diagonal)
    # Two names a line of the legend: room for more than four lines comes on top.
    figure = new_figure(width, 3.3 + (0.18 * max(0, -(-names // 2) - 4) if legend else 0))
    with styled():
        axes = figure.subplots()
        _draw_chart(axes, chart)
        if legend and any(text for text in axes.get_legend_handles_labels()[1] if not text.startswith("_")):
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
    styles = chart.styles
    for one in chart.series:
        _draw(axes, one, styles.get(one.name if one.like is None else one.like, Style(-1, 0, (), 1.0)))
    if chart.diagonal:
        far = max((p.x for s in chart.series for p in s.points), default=1)
        axes.plot([1, far], [1, far], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label=chart.diagonal)
        _annotate(axes, chart.diagonal, far, far, INK)
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel)
    axes.margins(x=0.08, y=0.1)
    if chart.log:
        _plain_logarithm(axes)
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", nbins=7)
    if chart.ticks:
        axes.set_xticks(range(len(chart.ticks)), chart.ticks)


def _plain_logarithm(axes: Any) -> None:
    """A logarithmic y axis that says 1, 2, 5, 10; where that leaves too few, evenly spaced numbers."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    steps = [n * 10.0**e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high))) for n in (1, 2, 5)]
    steps = [step for step in steps if low <= step <= high]
    axes.yaxis.set_major_locator(FixedLocator(steps) if len(steps) > 2 else MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _draw(axes: Any, series: Series, style: Style) -> None:
    color = INK if style.color < 0 else COLORS[style.color]
    shade = 0.4 if series.faint else style.shade
    points = sorted(series.points, key=lambda p: p.x)
    x, y = [p.x for p in points], [p.y for p in points]
    axes.plot(
        x,
        y,
        linestyle=((0, style.dashes) if style.dashes else "-") if series.line is None else series.line or "none",
        marker=OUTLINES[style.mark] if series.markers else "",
        markersize=6,
        markeredgewidth=0,
        color=color,
        linewidth=0.8 if series.faint else 1.5,
        alpha=shade,
        label=series.name or "_",
    )
    if any(p.x_bounds or p.y_bounds for p in points):
        errors = {"xerr": _errors(x, [p.x_bounds for p in points]), "yerr": _errors(y, [p.y_bounds for p in points])}
        axes.errorbar(x, y, **errors, fmt="none", ecolor=color, alpha=shade, elinewidth=0.7)
    for p in points:
        if p.note:
            _annotate(axes, p.note, p.x, p.y, color)
        if p.tip:
            # A wide, invisible dot, so that pointing at it is easy.
            (dot,) = axes.plot([p.x], [p.y], "o", color=color, alpha=0, markersize=14)
            tip(dot, p.tip)


def _annotate(axes: Any, text: str, x: float, y: float, color: str) -> None:
    """A note at a point; `_spread_notes` puts it beside it."""
    note = axes.annotate(text, (x, y), xytext=(0, 0), textcoords="offset points", fontsize=8, color=color)
    note.set_in_layout(False)


def _errors(values: Sequence[float], bounds: Sequence[tuple[float, float] | None]) -> list[list[float]]:
    """Below and above each value; nothing where no bounds are known."""
    pairs = [
        (math.nan, math.nan) if b is None else (max(0.0, value - b[0]), max(0.0, b[1] - value))
        for value, b in zip(values, bounds, strict=True)
    ]
    return [[low for low, _ in pairs], [high for _, high in pairs]]


def _spread_notes(figure: Any, axes: Any, chart: Chart) -> None:
    """Move the notes off the marks and off each other, each to the first free place; hide one that has none.

    The figure must be complete: its layout is computed here.
    """
    if not axes.texts:
        return
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # what is placed stays
    half = _MARK * figure.dpi / 72
    marks = (axes.transData.transform((p.x, p.y)) for one in chart.series for p in one.points)
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in marks]
    for note in sorted(axes.texts, key=lambda note: note.xy):
        for right, up, horizontal, vertical in _PLACES:
            note.set_position((right, up))
            note.set(horizontalalignment=horizontal, verticalalignment=vertical)
            box = note.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            note.set_visible(False)
