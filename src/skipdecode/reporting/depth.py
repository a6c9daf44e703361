"""Sections on depth: which layers run where, and what a calibration learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from skipdecode.reporting.page import Picture, Section, Table
from skipdecode.reporting.plots import Point, Series, calibration_figure, depth_figure, line_figure
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import Schedule

__all__ = ["calibration_sections", "depth_section"]

_SIZE = (4.7, 3.3)


def depth_section(sources: Sequence[Source]) -> Section:
    """Every schedule that the sources name, once."""
    found: dict[str, Schedule] = {}
    for schedule in _schedules(sources):
        if not schedule.is_full:
            found.setdefault(json.dumps(schedule.to_dict(), sort_keys=True), schedule)
    intro = "A layer that is left out at a position is left out at every later one, so its cache is never missed."
    return Section("Which layers run where", intro, pictures=[_picture(schedule) for schedule in found.values()])


def _schedules(sources: Sequence[Source]) -> list[Schedule]:
    found = [s.data for s in of_kind(sources, "schedule")]
    decodings: list[Any] = [s.data.data["config"].get("method", {}) for s in of_kind(sources, "eval")]
    decodings += [row.get("decoding") or {} for s in of_kind(sources, "quality") for row in s.data["runs"]]
    found += [Schedule.from_dict(d["schedule"]) for d in decodings if d.get("schedule")]
    return found


def _picture(schedule: Schedule) -> Picture:
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first} of {schedule.num_layers} layers"
    depth += "" if first == last else f", falling to {last} after {schedule.seq_len} positions"
    label = f"Layers by generation position under {schedule.name}: {depth}; drop order {list(schedule.drop_order)}."
    caption = f"{schedule.name}: {depth}; nominal {schedule.nominal_speedup:.2f}x"
    return Picture(depth_figure(schedule, max(schedule.seq_len, 8), size=_SIZE), caption, label)


def calibration_sections(sources: Sequence[Source]) -> list[Section]:
    """What each calibration learned, and how its prediction held."""
    return [_calibration(source) for source in of_kind(sources, "calibration")]


def _calibration(source: Source) -> Section:
    data = source.data
    schedule = Schedule.from_dict(data["schedule"])
    rounds = data.get("rounds", [])
    if rounds:
        base = rounds[0]["base"]
        importance = {int(layer): loss - base for layer, loss in rounds[0]["losses"].items()}
        what = "loss added when it alone is left out"
    else:
        importance, what = dict(enumerate(data.get("block_influence", []))), "block influence"
    most = max(importance, key=lambda layer: importance[layer], default=None)
    label = f"Layers by {what}; the most: layer {most}. Drop order {list(schedule.drop_order)}."
    pictures = [
        Picture(
            calibration_figure(schedule, importance, importance_label=what),
            f"{schedule.name}: what each layer is worth on these records, and where the schedule leaves it out",
            label,
            wide=True,
        )
    ]
    verdicts = data["verdicts"]
    if len(rounds) > 1:
        pictures.append(_search(rounds))
    table = Table(
        f"Loss per response token on {data.get('records', '?')} records, teacher-forced",
        ["schedule", "speed-up", "mean layers", "predicted", "measured", "held out"],
        [
            [
                v["name"],
                f"{v['speedup']:.2f}x",
                f"{v['mean_layers']:.1f}",
                f"{v['predicted']:.4f}",
                f"{v['measured']:.4f}",
                "–" if v.get("held_out") is None else f"{v['held_out']:.4f}",
            ]
            for v in verdicts
        ],
    )
    return Section(f"Calibration: {source.name}", pictures=pictures, tables=[table])


def _search(rounds: Sequence[dict[str, Any]]) -> Picture:
    losses = [r["base"] for r in rounds]
    points = tuple(Point(i, loss) for i, loss in enumerate(losses))
    figure = line_figure([Series("", points, markers=False)], "layers left out", "loss per response token")
    label = f"Loss as layers go, one at a time: {losses[0]:.3f} with all, {losses[-1]:.3f} at the end of the search."
    return Picture(figure, "Loss as layers are left out in the learned order, everywhere", label)
