"""Pictures of runs as SVG text, the same for the same runs."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from skipdecode.errors import MissingExtraError
from skipdecode.evaluation.results import Run

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

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    shown = [
        (i, run) for i, run in enumerate(runs) if run.score(metric) is not None and run.measured_speedup is not None
    ]
    if not shown:
        return None
    figure, axes = _figure(4.6, 3.2)
    for i, run in shown:
        x, y = run.measured_speedup or 0.0, run.score(metric) or 0.0
        axes.errorbar(
            x,
            y,
            xerr=_error(x, run.data.get("measured_speedup_interval")),
            yerr=_error(y, run.data["metrics"][metric]["interval"]),
            fmt="o",
            color=_COLORS[i % len(_COLORS)],
            capsize=2,
            linewidth=1,
        )
        axes.annotate(run.name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.set_xlabel("measured speed-up over full depth (decoding)")
    axes.set_ylabel(metric)
    axes.margins(x=0.2, y=0.2)
    return _svg(figure)


def buckets_svg(runs: Sequence[Run], axis: str, metric: str) -> str | None:
    """A metric by bucket of ``prompt_tokens`` or ``reference_tokens``, a line a run; None if no run has it."""
    lines = [(i, run.name, run.data["buckets"].get(axis, [])) for i, run in enumerate(runs)]
    lines = [(i, name, buckets) for i, name, buckets in lines if any(metric in b["metrics"] for b in buckets)]
    if not lines:
        return None
    figure, axes = _figure(4.6, 2.8)
    for i, name, buckets in lines:
        values = [b["metrics"].get(metric, float("nan")) for b in buckets]
        axes.plot(range(len(values)), values, marker="o", color=_COLORS[i % len(_COLORS)], label=name, linewidth=1.2)
    longest = max((buckets for _, _, buckets in lines), key=len)
    axes.set_xticks(range(len(longest)), [f"{b['low']}-{b['high']}\n(n={b['n']})" for b in longest])
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel(metric)
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("pictures in a report", "eval") from None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
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
