"""Charts with matplotlib (extra `plot`), imported only when one is drawn; as a PNG, or as SVG for a page.

A chart has points with bounds, joined by lines, a name each. Knows nothing about runs or files.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skipdecode.errors import MissingExtraError

__all__ = ["COLORS", "INK", "LEFT_OUT", "Chart", "Point", "Series", "chart_figure", "check_matplotlib"]
__all__ += ["draw_chart", "grouped", "new_figure", "png", "styled", "styles_of", "svg"]

T = TypeVar("T")

# Okabe and Ito's colours, made a little darker: told apart by colour-blind readers, and on white paper.
COLORS = ("#0b6fae", "#c8501e", "#0a8f6a", "#a8508a", "#a37a00", "#3d97c4", "#6b5bb5", "#5a6673")
INK, GRID, LEFT_OUT = "#1d2733", "#d5dbe1", "#e6e8e4"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "skipdecode",
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
_VARIABLES = {color: f"--c{i}" for i, color in enumerate(COLORS)} | {INK: "--ink", GRID: "--grid", LEFT_OUT: "--idle"}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_MARKS = "os^Dv*PXph<>"
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.6)), (0, (5, 1.6, 1, 1.6)))
_SHADES = (1.0, 0.85, 0.72, 0.6)


# ---------------------------------------------------------------------- figures


def check_matplotlib() -> None:
    """Raise MissingExtraError, before the work whose result is to be drawn, where there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError("a picture", "plot") from None


def styled() -> Any:
    """The context in which figures are made, drawn on and saved."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Any:
    """An empty figure of this many inches; raises MissingExtraError without matplotlib."""
    check_matplotlib()
    from matplotlib.figure import Figure

    with styled():
        # Not through pyplot: no window system, no global state.
        return Figure(figsize=(width, height), dpi=150, layout="constrained")


def png(figure: Any) -> bytes:
    """The figure as a PNG, on white."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def svg(figure: Any) -> str:
    """The figure as an SVG element for an HTML page, the same text for the same figure.

    It is transparent. Its colours are CSS variables of the page: ``--ink``, ``--grid``, ``--idle``, ``--c0`` to
    ``--c7``.
    """
    buffer = io.StringIO()
    with styled():
        figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue()
    # The page has one prologue and many pictures: names of groups, which nothing refers to, would be there twice.
    text = re.sub(r' id="[\w.]+_\d+"', "", text[text.index("<svg") :])
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    return text


# ---------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Point:
    """A value with its bounds (low and high), where they are known."""

    x: float
    y: float
    x_bounds: tuple[float, float] | None = None
    y_bounds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Series:
    """Points that belong together, drawn from left to right.

    Parameters
    ----------
    name : str
        Its name in the legend.
    line : {"-", ":", ""}, optional
        How the points are joined; default: as its style says.
    markers : bool
        Draw the points themselves.
    like : str, optional
        The name of the series whose colour it has; it is drawn faint, and is not in the legend.
    """

    name: str
    points: Sequence[Point]
    line: str | None = None
    markers: bool = True
    like: str | None = None


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Parameters
    ----------
    level : (value, low, high, name), optional
        A horizontal line with a band.
    diagonal : str
        Name of the line y = x, if it is to be drawn.
    least : float, optional
        The y axis begins here, or above.
    log : bool
        Whether the y axis is logarithmic.
    ticks : sequence of str
        Names of x = 0, 1, 2, … in place of numbers.
    """

    series: Sequence[Series]
    xlabel: str
    ylabel: str
    title: str = ""
    level: tuple[float, float, float, str] | None = None
    diagonal: str = ""
    least: float | None = None
    log: bool = False
    ticks: Sequence[str] = ()


def grouped(items: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    """Items of the same name together, names in the order of their first item."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return found


def styles_of(charts: Sequence[Chart]) -> dict[str, dict[str, Any]]:
    """How each name is drawn in all of some charts, as options of matplotlib's `plot`.

    A colour and a mark by what stands before a name's first comma, a shade and a dash by what follows.
    """
    names = dict.fromkeys(one.name for chart in charts for one in chart.series if one.like is None)
    heads = grouped(names, lambda name: name.split(",")[0])
    if len(heads) == 1:
        heads = {name: [name] for name in names}
    return {
        name: {
            "color": COLORS[hue % len(COLORS)],
            "marker": _MARKS[hue % len(_MARKS)],
            "linestyle": _DASHES[i % len(_DASHES)],
            "alpha": _SHADES[i % len(_SHADES)],
        }
        for hue, variants in enumerate(heads.values())
        for i, name in enumerate(variants)
    }


def chart_figure(charts: Sequence[Chart], *, columns: int = 3, size: tuple[float, float] = (3.5, 2.9)) -> Any:
    """Charts of this many inches in one figure, below them one legend for all."""
    styles = styles_of(charts)
    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    lines = -(-len(styles) // max(1, columns * 2))
    figure = new_figure(columns * size[0], rows * size[1] + (0.2 * lines + 0.2 if len(styles) > 1 else 0))
    with styled():
        places = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, chart in zip(places, charts, strict=False):
            draw_chart(axes, chart, styles)
        for axes in places[len(charts) :]:
            axes.remove()
        pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
        shown = {label: handle for handle, label in reversed(pairs)}
        if len(shown) > 1:
            labels = sorted(shown, key=lambda label: [label for _, label in pairs].index(label))
            handles = [shown[label] for label in labels]
            figure.legend(handles, labels, loc="outside lower center", ncols=columns * 2, fontsize=8)
    return figure


def draw_chart(axes: Any, chart: Chart, styles: dict[str, dict[str, Any]]) -> None:
    """Draw a chart on axes of matplotlib, each series in the style of its name."""
    axes.grid(axis="y")
    if chart.level is not None:
        value, low, high, name = chart.level
        axes.axhspan(low, high, color=INK, alpha=0.08, linewidth=0)
        axes.axhline(value, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), label=name)
    for one in chart.series:
        _draw(axes, one, styles[one.name if one.like is None else one.like])
    if chart.diagonal:
        far = max((p.x for s in chart.series for p in s.points), default=1)
        axes.plot([1, far], [1, far], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), label=chart.diagonal)
    axes.set(xlabel=chart.xlabel, ylabel=chart.ylabel, title=chart.title)
    axes.margins(x=0.06, y=0.1)
    if chart.log:
        _plain_logarithm(axes)
    elif chart.least is not None:
        axes.set_ylim(bottom=max(chart.least, axes.get_ylim()[0]) if chart.least else 0)
    axes.locator_params(axis="x", nbins=5)
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


def _draw(axes: Any, series: Series, style: dict[str, Any]) -> None:
    points = sorted(series.points, key=lambda p: p.x)
    x, y = [p.x for p in points], [p.y for p in points]
    if series.line is not None:
        style = style | {"linestyle": series.line or "none"}
    style = style | {"marker": style["marker"] if series.markers else ""}
    faint = {} if series.like is None else {"alpha": 0.4, "linewidth": 0.8}
    line = {"markersize": 5, "markeredgewidth": 0, "linewidth": 1.4, "label": "_" if faint else series.name}
    axes.plot(x, y, **line | style | faint)
    if any(p.x_bounds or p.y_bounds for p in points):
        errors = {"xerr": _errors(x, [p.x_bounds for p in points]), "yerr": _errors(y, [p.y_bounds for p in points])}
        axes.errorbar(x, y, **errors, fmt="none", ecolor=style["color"], alpha=style["alpha"], elinewidth=0.7)


def _errors(values: Sequence[float], bounds: Sequence[tuple[float, float] | None]) -> list[list[float]]:
    """Below and above each value; nothing where no bounds are known."""
    pairs = [
        (math.nan, math.nan) if b is None else (max(0.0, value - b[0]), max(0.0, b[1] - value))
        for value, b in zip(values, bounds, strict=True)
    ]
    return [[low for low, _ in pairs], [high for _, high in pairs]]
