"""Pictures of runs as SVG text, the same for the same runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from skipdecode.errors import MissingExtraError
from skipdecode.evaluation.results import Run, curve_name

__all__ = ["buckets_svg", "tradeoff_svg"]

_COLORS = ("#1b6ca8", "#d1603d", "#3a8f5c", "#8a5fb0", "#b58a1e", "#5d6d7e", "#c2478b", "#2a9d9d")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "skipdecode",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def tradeoff_svg(runs: Sequence[Run], metric: str) -> str | None:
    """Quality against measured speed-up, a point a run with both intervals; None if no run has both.

    Runs whose names differ in an ending such as "-2x" only are one curve.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    shown = [run for run in runs if run.score(metric) is not None and run.measured_speedup is not None]
    if not shown:
        return None
    figure, axes = _figure()
    for i, (name, curve) in enumerate(_curves(shown).items()):
        points = [(run.measured_speedup or 0.0, run.score(metric) or 0.0, run) for run in curve]
        points.sort(key=lambda point: point[0])
        color = _COLORS[i % len(_COLORS)]
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], "o-", color=color, linewidth=1.2, label=name)
        for x, y, run in points:
            x_error = _error(x, run.data.get("measured_speedup_interval"))
            y_error = _error(y, run.data["metrics"][metric]["interval"])
            axes.errorbar(x, y, xerr=x_error, yerr=y_error, color=color, capsize=2, linewidth=0.7)
            if (nominal := run.data.get("nominal_speedup")) is not None:
                axes.annotate(f"{nominal:.1f}x", (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xlabel("measured speed-up over full depth (decoding)")
    axes.set_ylabel(metric)
    axes.margins(x=0.1, y=0.1)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=2)
    return _svg(figure)


def buckets_svg(runs: Sequence[Run], axis: str, metric: str) -> str | None:
    """A metric by bucket of ``prompt_tokens`` or ``reference_tokens``, a line a run; None if no run has it."""
    lines = [(run.name, run.data["buckets"].get(axis, [])) for run in runs]
    lines = [(name, buckets) for name, buckets in lines if any(metric in b["metrics"] for b in buckets)]
    if not lines:
        return None
    figure, axes = _figure()
    for i, (name, buckets) in enumerate(lines):
        values = [b["metrics"].get(metric, float("nan")) for b in buckets]
        axes.plot(range(len(values)), values, "o-", color=_COLORS[i % len(_COLORS)], label=name, linewidth=1.2)
    longest = max((buckets for _, buckets in lines), key=len)
    axes.set_xticks(range(len(longest)), [_range(b) for b in longest])
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel(metric)
    figure.legend(loc="outside upper left", frameon=False, fontsize=8, ncols=2)
    return _svg(figure)


def _curves(runs: Sequence[Run]) -> dict[str, list[Run]]:
    curves: dict[str, list[Run]] = {}
    for run in runs:
        curves.setdefault(curve_name(run.name), []).append(run)
    return curves


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return f"{low if low == high else f'{low}-{high}'}\n(n={bucket['n']})"


def _figure() -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("pictures in a report", "eval") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 3.4), layout="constrained")
        return figure, figure.subplots()


def _svg(figure: Any) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    # Inside HTML the document's own prologue would be an error.
    return text[text.index("<svg") :]


def _error(value: float, interval: dict[str, Any] | None) -> list[list[float]] | None:
    if interval is None:
        return None
    return [[max(0.0, value - interval["low"])], [max(0.0, interval["high"] - value)]]
