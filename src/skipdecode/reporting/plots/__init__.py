"""Pictures with matplotlib (extra `plot`), imported only when one is drawn: PNG files, and SVG for a page.

Knows schedules and numbers; nothing about runs or files.
"""

from skipdecode.reporting.plots.output import check_matplotlib, png
from skipdecode.reporting.plots.standard import calibration_figure, depth_figure, loss_figure, speed_png

__all__ = ["calibration_figure", "check_matplotlib", "depth_figure", "loss_figure", "png", "speed_png"]
