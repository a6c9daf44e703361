"""Pictures as PNG, with matplotlib (extra `plot`), which is imported only when one is drawn."""

from __future__ import annotations

import io
from typing import Any

from skipdecode.errors import MissingExtraError
from skipdecode.schedule import Schedule

__all__ = ["schedule_png"]

_RUNS, _LEFT_OUT = "#2f6f9f", "#e9e9e4"
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
    shown = schedule.seq_len if positions is None else max(1, positions)
    ends = [schedule.drop_position(layer) for layer in range(schedule.num_layers)]
    axes = figure.subplots()
    axes.set_facecolor(_LEFT_OUT)
    axes.barh(range(schedule.num_layers), [shown if e is None else min(e, shown) for e in ends], 1.0, color=_RUNS)
    axes.set(
        xlim=(0, shown),
        ylim=(-0.5, schedule.num_layers - 0.5),
        xlabel="generation position",
        ylabel="layer",
        title=title or schedule.name,
    )
    axes.locator_params(integer=True)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=2, frameon=False)
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
