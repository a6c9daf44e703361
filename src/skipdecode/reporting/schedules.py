"""Sections on schedules: which layers run where, what a calibration learned, the losses of tuning under one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from skipdecode.reporting.page import Picture, Section, table
from skipdecode.reporting.plots.lines import Chart, Point, Series
from skipdecode.reporting.plots.standard import calibration_figure, depth_figure, importance_of, loss_chart
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import Schedule

__all__ = ["calibration_section", "depth_sections", "training_sections"]

_NESTED = "A layer that is left out at a position is left out at every later one, so its cache is never missed."
_SHOWN = 6  # pictures of a kind that a reader sees without asking for more
_VERDICTS = {
    "schedule": "{name}",
    "speed-up": "{speedup:.2f}x",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "prompt layers": "{prompt_layers}",
    "mean layers": "{mean_layers:.1f}",
    "loss": "{measured:.4f}",
    "held out": "{held_out:.4f}",
}
_CURVES = (
    "Thick lines are means of 15 steps, thin ones some single steps; marks are losses on the dev set. A schedule that "
    "is sampled now and then has a line of its own."
)


def depth_sections(sources: Sequence[Source]) -> list[Section]:
    """Every schedule that the sources name, once; under all the names that it has there."""
    decodings: list[Any] = [s.data.data["config"].get("method", {}) for s in of_kind(sources, "evaluation")]
    decodings += [row.get("decoding") or {} for s in of_kind(sources, "quality-table") for row in s.data["runs"]]
    schedules = [s.data for s in of_kind(sources, "schedule")]
    schedules += [Schedule.from_dict(d["schedule"]) for d in decodings if d.get("schedule")]
    found: dict[Schedule, dict[str, Schedule]] = {}
    for schedule in (s for s in schedules if not s.is_full):
        found.setdefault(replace(schedule, name="any"), {})[schedule.name] = schedule
    pictures = [_depth(replace(next(iter(same.values())), name=", ".join(same))) for same in found.values()]
    return [Section("Which layers run where", _NESTED, pictures=pictures, shown=_SHOWN)]


def _depth(schedule: Schedule) -> Picture:
    first, last = schedule.budgets[0], schedule.budgets[-1]
    depth = f"{first} of {schedule.num_layers} layers"
    depth += "" if first == last else f", falling to {last} after {schedule.seq_len} positions"
    label = f"Layers by generation position under {schedule.name}: {depth}; drop order {list(schedule.drop_order)}."
    caption = f"{schedule.name}: {depth}; nominal {schedule.nominal_speedup:.2f}x"
    return Picture(partial(depth_figure, schedule, max(schedule.seq_len, 8), size=(4.7, 3.3)), caption, label)


def calibration_section(source: Source) -> Section:
    """What a calibration learned, next to the baselines."""
    data, schedule = source.data, source.data["schedule"]
    what, importance = importance_of(data)
    most = max(importance, key=lambda layer: importance[layer], default=None)
    label = f"Layers by {what}; the most: layer {most}. Drop order {schedule['drop_order']}."
    caption = f"{schedule['name']}: what each layer is worth on these records, and where the schedule leaves it out"
    pictures = [Picture(partial(calibration_figure, data), caption, label, wide=True)]
    if len(bases := [r["base"] for r in data["rounds"]]) > 1:
        series = Series("", [Point(i, loss) for i, loss in enumerate(bases)], markers=False)
        chart = Chart([series], "layers left out", "loss per response token")
        label = f"Loss as layers go, one at a time: {bases[0]:.3f} with all, {bases[-1]:.3f} at the end of the search."
        pictures.append(Picture(chart, "Loss as layers are left out in the learned order, everywhere", label))
    losses = f"Loss per response token on {data.get('records', '?')} records, teacher-forced"
    verdicts = table(losses, data["verdicts"], _VERDICTS)
    return Section(f"Calibration: {source.name}", pictures=pictures, tables=[verdicts])


def training_sections(sources: Sequence[Source]) -> list[Section]:
    """The loss curve of every log of `skipdecode tune`."""
    return [
        Section(
            "Loss while tuning", _CURVES, pictures=[_curve(log) for log in of_kind(sources, "tuning")], shown=_SHOWN
        )
    ]


def _curve(log: Source) -> Picture:
    rows = log.data
    dev = [r for r in rows if r["kind"] == "dev"]
    label = f"Cross-entropy per response token over {max(r['step'] for r in rows)} steps."
    if dev:
        best = min(dev, key=lambda r: float(r["cross_entropy"]))
        label += f" Best on dev: {best['cross_entropy']:.4f} at step {best['step']}."
    names = dict.fromkeys(name for r in dev for name in r if name not in ("kind", "step"))
    # By place, for a schedule's name may hold anything.
    columns = {"step": "{step}"} | {n.replace("_", " "): f"{{loss {i}:.4f}}" for i, n in enumerate(names)}
    cells = [{"step": r["step"]} | {f"loss {i}": r.get(n) for i, n in enumerate(names)} for r in dev]
    numbers = table("Losses on the dev set", cells, columns) if dev else None
    return Picture(loss_chart(rows), f"{log.name}. {label}", label, numbers)
