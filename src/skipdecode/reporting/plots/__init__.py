"""Pictures with matplotlib (extra `plot`), imported only when one is drawn: PNG files, and SVG for a page.

Knows schedules and numbers; nothing about runs or files.
"""

from skipdecode.reporting.plots.lines import Chart, Point, Series, bar_figure, grouped, line_figure
from skipdecode.reporting.plots.output import png, svg
from skipdecode.reporting.plots.standard import (
    calibration_figure,
    depth_figure,
    importance_of,
    loss_figure,
    share_figure,
    speed_figure,
    speed_png,
)

__all__ = [
    "Chart",
    "Point",
    "Series",
    "bar_figure",
    "calibration_figure",
    "depth_figure",
    "grouped",
    "importance_of",
    "line_figure",
    "loss_figure",
    "png",
    "share_figure",
    "speed_figure",
    "speed_png",
    "svg",
]
