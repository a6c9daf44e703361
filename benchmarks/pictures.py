"""Draw the pictures of docs/ from the result files they show: what `skipdecode report` draws, as PNG.

python benchmarks/pictures.py
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from skipdecode.reporting.charts import png
from skipdecode.reporting.plots import calibration_figure
from skipdecode.reporting.quality import quality_section
from skipdecode.reporting.results import groups_of
from skipdecode.reporting.sources import read_source

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "img"
CALIBRATION = ROOT / "results" / "calibration-e2e-smollm2-135m-5x.json"
METHODS = ("full", "paper", "even", "calibrated", "unified")


def main() -> int:
    """Draw all; returns 0."""
    calibration = read_source(CALIBRATION)
    table = read_source(ROOT / "results" / "e2e-smollm2-135m.json")
    shown = [row for row in table.data["runs"] if row["method"] in METHODS]
    (group,) = groups_of([replace(table, data=table.data | {"runs": shown})])
    figures = {
        "calibration-e2e": calibration_figure(calibration.data),
        "quality-e2e": quality_section(group).pictures[0].figure(),
    }
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (IMAGES / f"{name}.png").write_bytes(png(figure))
    return 0


if __name__ == "__main__":
    sys.exit(main())
