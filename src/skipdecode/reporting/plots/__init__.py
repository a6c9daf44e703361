"""Pictures with matplotlib (extra `plot`), imported only when one is drawn: PNG files, and SVG for a page.

Knows schedules and numbers; nothing about runs or files.
"""

from skipdecode.reporting.plots.depth import calibration_figure, depth_figure
from skipdecode.reporting.plots.lines import Point, Series, bar_figure, line_figure
from skipdecode.reporting.plots.output import png, svg
from skipdecode.reporting.plots.standard import loss_figure, share_figure, speed_figure, speed_png

__all__ = [
    "Point",
    "Series",
    "bar_figure",
    "calibration_figure",
    "depth_figure",
    "line_figure",
    "loss_figure",
    "png",
    "share_figure",
    "speed_figure",
    "speed_png",
    "svg",
]
