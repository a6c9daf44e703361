"""Draw the pictures of docs/ from the result files that they show.

python benchmarks/pictures.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tables import compared_targets

from skipdecode.common.jsonl import read_result
from skipdecode.evaluation.pictures import Chart, Point, Series, charts_png
from skipdecode.schedule import Schedule

ROOT = Path(__file__).parents[1]
IMAGES, RESULTS = ROOT / "docs" / "img", ROOT / "results"
METHODS = ("paper", "even", "calibrated", "unified")
METRICS = {"bleu": "BLEU", "rougeL": "ROUGE-L", "bertscore_f1": "BERTScore F"}


def quality_png(table: dict[str, Any]) -> bytes:
    """A published table: scores against the measured speed-up of whole requests, with 95% intervals."""
    (full,) = [row for row in table["runs"] if row["method"] == "full"]
    methods = {name: [row for row in table["runs"] if row["method"] == name] for name in METHODS}

    def point(row: dict[str, Any], metric: str) -> Point:
        return Point(row["request_speedup"], row[metric], tuple(row["intervals"][metric]))

    charts = [
        Chart(
            [Series(name, [point(row, metric) for row in rows]) for name, rows in methods.items()],
            "speed-up of whole requests",
            label,
            level=(full[metric], *full["intervals"][metric], "full depth"),
        )
        for metric, label in METRICS.items()
    ]
    return charts_png(charts)


def minutes_png(result: dict[str, Any]) -> bytes:
    """What each task's target keeps of full depth after minutes of preparation, with a fit and without."""
    full = (100.0, 100.0, 100.0, "full depth")
    charts = []
    targets = compared_targets(result)
    for task in dict.fromkeys(row["task"] for row in targets):
        rows = [row for row in targets if row["task"] == task]
        series = [
            Series(method, [Point(row["minutes"], 100 * row["kept"]) for row in rows if row["method"] == method])
            for method in dict.fromkeys(row["method"] for row in rows)
        ]
        speeds = sorted(row["request_speedup"] for row in rows)
        title = f"{task}, {speeds[0]:.1f}x to {speeds[-1]:.1f}x"
        charts.append(Chart(series, "minutes of preparation", "kept of full depth, %", title, level=full))
    return charts_png(charts, columns=2)


def calibration_charts(calibration: Mapping[str, Any]) -> list[Chart]:
    """Importance of layers with the drop order, and loss of a greedy search; from a document of `calibrate`."""
    schedule = Schedule.from_dict(calibration["schedule"])
    label, importance = "block influence", dict(enumerate(calibration["block_influence"]))
    if rounds := calibration["rounds"]:
        label = "loss added by skipping only this layer"
        importance = {int(layer): loss - rounds[0]["base"] for layer, loss in rounds[0]["losses"].items()}
    ranks = {layer: str(rank) for rank, layer in enumerate(schedule.drop_order, start=1)}
    points = [Point(layer, value, (0.0, value), ranks.get(layer, "")) for layer, value in importance.items()]
    losses = [Point(i, found["base"]) for i, found in enumerate(rounds)]
    return [
        Chart([Series("a layer, with its place in the drop order", points, "o")], "layer", label, schedule.name),
        Chart([Series("search", losses, "-")], "layers skipped", "loss per response token", "greedy search"),
    ]


def main() -> int:
    """Draw all; returns 0."""
    figures = {
        "calibration-e2e": charts_png(
            calibration_charts(read_result(RESULTS / "calibration-e2e-smollm2-135m-5x.json")), size=(5.2, 3.9)
        ),
        "quality-e2e": quality_png(read_result(RESULTS / "e2e-smollm2-135m.json")),
        "ready": minutes_png(read_result(RESULTS / "ready-smollm2-135m.json")),
    }
    for name, figure in figures.items():
        (IMAGES / f"{name}.png").write_bytes(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
