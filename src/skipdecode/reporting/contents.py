"""What a report holds: every section that the sources have something for, in the order in which a reader asks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from skipdecode.evaluation.compare import Pair
from skipdecode.evaluation.results import Run
from skipdecode.reporting.charts import chart_figure
from skipdecode.reporting.outputs import length_section, sample_section
from skipdecode.reporting.page import Card, Picture, Section, render, table
from skipdecode.reporting.plots import (
    calibration_figure,
    depth_figure,
    importance_of,
    loss_chart,
    schedule_losses,
    speed_figure,
)
from skipdecode.reporting.quality import best_first, pair_sections, quality_card, quality_section
from skipdecode.reporting.results import groups_of
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import Schedule

__all__ = ["BENCH", "html_report"]

BENCH = {
    "engine": "{engine}",
    "batch": "{batch}",
    "prompt": "{prompt}",
    "nominal": "{nominal_speedup:g}x",
    "layers": "{mean_layers:.1f}",
    "request": "{request_speedup:.2f}x",
    "decode": "{decode_speedup:.2f}x",
    "tokens/s": "{decode_tokens_per_s:.1f}",
    "byte bound": "{amdahl_bound:.2f}x",
    "x transformers": "{speedup_over_transformers:.2f}x",
    "of limit": "{roofline_share:.0%}",
}
"""Columns of a table of `skipdecode bench`."""

_NESTED = "A layer that is left out at a position is left out at every later one, so its cache is never missed."
_ABOVE = "Above each panel: the names of the schedule, layers of a token, nominal speed-up"
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
_SELF = {
    "schedule": "{name}",
    "nominal": "{nominal_speedup:.2f}x",
    "request": "{measured_speedup_with_prompt:.2f}x",
    "decode": "{measured_speedup:.2f}x",
    "perplexity": "{perplexity:.2f}",
    "of the base model's": "{of_base[estimate]:.2f}x",
    "KL, nats": "{kl[estimate]:.3f}",
    "equal tokens": "{top1_agreement[estimate]:.1f}%",
    "instructions": "{instructions[followed]:.0%}",
}
_DEV = {"log": "{log}", "steps": "{steps}", "best": "{best:.4f}", "at step": "{step}", "by schedule": "{each}"}
_ENVIRONMENT = {
    "result": "{result}",
    "date": "{date:.10}",
    "commit": "{commit}",
    "machine": "{machine}",
    "threads": "{threads}",
    "system": "{os}, Python {python}",
    **{name: f"{{packages[{name}]}}" for name in ("skipdecode", "torch", "transformers")},
}


def html_report(
    sources: Sequence[Source], pairs: Sequence[Pair] = (), *, title: str = "skipdecode report", progress: bool = False
) -> str:
    """One HTML document without outside parts; the same text for the same sources.

    Parameters
    ----------
    sources : sequence of Source
        What is reported: one file or more.
    pairs : sequence of Pair
        Runs compared, from `compare_runs`.
    progress : bool
        Show a bar.

    Raises
    ------
    MissingExtraError
        matplotlib or Jinja2 is not installed.
    """
    groups = best_first(groups_of(sources))
    sections = [*map(quality_section, groups), *pair_sections(pairs, sources)]
    sections += [section for group in groups for section in (sample_section(group), length_section(group))]
    sections += [_self_generated(source) for source in of_kind(sources, "self-generated")]
    sections += [_bench(source) for source in of_kind(sources, "bench")]
    sections.append(_schedules(sources))
    sections += [_calibration(source) for source in of_kind(sources, "calibration")]
    sections += [_tuning(of_kind(sources, "tuning")), _environments(sources), _settings(sources)]
    cards = [*map(quality_card, groups), *_speed_cards(sources)]
    return render(title, [source.name for source in sources], cards, sections, progress=progress)


def _self_generated(source: Source) -> Section:
    """A result of `skipdecode eval --self`."""
    texts = f"{source.data['n']} texts of each schedule; perplexity is that of the base model at full depth on them"
    return Section(f"Self-generated text: {source.name}", tables=[table(texts, source.data["rows"], _SELF)])


# ---------------------------------------------------------------------- speed


def _bench(source: Source) -> Section:
    """A result of `skipdecode bench`."""
    rows = source.data["rows"]
    cell = "{engine}, batch {batch}, nominal {nominal_speedup:g}x: "
    words = "; ".join((cell + "{decode_speedup:.2f}x").format_map(r) for r in rows)
    best = (cell + "{roofline_share:.0%}").format_map(max(rows, key=lambda r: float(r["roofline_share"])))
    caption = (
        "Decode speed-up of each engine over itself at full depth (faint: what the bytes of the layers left allow), "
        f"and the share of a step's limit that it reaches. {_limits(source)}"
    )
    label = f"Decode speed-up against nominal: {words}. Share of a step's limit; the most is {best}."
    columns = {name: form for name, form in BENCH.items() if name != "request" or rows[0].get("request_speedup")}
    command = source.data.get("config", {}).get("command")
    made_by = f"{source.name}: {command}" if command else source.name
    picture = Picture(partial(speed_figure, rows), caption, label)
    return Section(f"Engines: {_subject(source)}", pictures=[picture], tables=[table(made_by, rows, columns)])


def _limits(source: Source) -> str:
    """What 100% is."""
    rates = source.data.get("products_gflop_s", {}).items()
    large = ", ".join(f"{rate:.0f} GFLOP/s in {kind}" for kind, rate in rates)
    return (
        f"The limit is the longer of a step's bytes over the rate of a large read, {source.data['bandwidth_gb_s']:.1f} "
        "GB/s, and its operations over the rate of a large product" + (f", {large}." if large else ".")
    )


def _subject(source: Source) -> str:
    config = source.data.get("config", {})
    return PurePath(str(config.get("model") or config.get("geometry") or source.name)).name


def _speed_cards(sources: Sequence[Source]) -> list[Card]:
    """The best of each benchmark of speed alone."""
    cards = []
    for source in of_kind(sources, "bench"):
        over = [r for r in source.data["rows"] if r["nominal_speedup"] == 1 and r.get("speedup_over_transformers")]
        best = max(over, key=lambda r: float(r["speedup_over_transformers"]), default=None)
        if best is not None and best["speedup_over_transformers"] > 1:
            how = "{engine} engine, batch {batch}; quality is not measured here".format_map(best)
            answer = f"{best['speedup_over_transformers']:.1f}x", "transformers' decode speed at full depth", [how]
            cpu = str(source.data.get("environment", {}).get("cpu", ""))
            cards.append(Card(f"Engine on {_subject(source)}", [answer], cpu))
    return cards


# ---------------------------------------------------------------------- schedules


def _schedules(sources: Sequence[Source]) -> Section:
    """Every schedule that the sources name, once; under all the names that it has there."""
    decodings: list[Any] = [s.data.data["config"].get("method", {}) for s in of_kind(sources, "evaluation")]
    decodings += [row.get("decoding") or {} for s in of_kind(sources, "quality-table") for row in s.data["runs"]]
    schedules = [s.data for s in of_kind(sources, "schedule")]
    schedules += [Schedule.from_dict(d["schedule"]) for d in decodings if d.get("schedule")]
    found: dict[Schedule, list[str]] = {}
    for schedule in (s for s in schedules if not s.is_full):
        found.setdefault(replace(schedule, name="any"), []).append(schedule.name)
    if not found:
        return Section("Which layers run where")
    titles: dict[str, Schedule] = {}
    for schedule, names in found.items():
        first, last = schedule.budgets[0], schedule.budgets[-1]
        depth = f"{first} of {schedule.num_layers}" if first == last else f"{first} to {last} of {schedule.num_layers}"
        titles[f"{', '.join(dict.fromkeys(names))}\n{depth} layers, {schedule.nominal_speedup:.2f}x"] = schedule
    label = "Layers by generation position. " + "; ".join(title.replace("\n", ": ") for title in titles)
    picture = Picture(partial(depth_figure, titles), _ABOVE, label)
    return Section("Which layers run where", _NESTED, pictures=[picture])


def _calibration(source: Source) -> Section:
    """What a calibration learned, next to the baselines."""
    data, schedule = source.data, source.data["schedule"]
    what, importance = importance_of(data)
    most = max(importance, key=lambda layer: importance[layer], default=None)
    label = f"Layers by {what}; the most: layer {most}. Drop order {schedule['drop_order']}."
    if bases := [found["base"] for found in data["rounds"]]:
        label += f" Loss as layers go: {bases[0]:.3f} with all, {bases[-1]:.3f} at the end of the search."
    caption = (
        f"{schedule['name']}: how much each layer matters on these records; where the schedule leaves it out; the loss "
        "as layers are left out at all positions, in the learned order"
    )
    losses = f"Loss per response token on {data.get('records', '?')} records, teacher-forced"
    return Section(
        f"Calibration: {source.name}",
        pictures=[Picture(partial(calibration_figure, data), caption, label)],
        tables=[table(losses, data["verdicts"], _VERDICTS)],
    )


def _tuning(logs: Sequence[Source]) -> Section:
    """The losses in every log of `skipdecode tune`."""
    if not logs:
        return Section("Loss while tuning")
    rows = []
    for log in logs:
        dev = [row for row in log.data if row["kind"] == "dev"]
        best: Mapping[str, Any] = min(dev, key=lambda row: float(row["cross_entropy"]), default={})
        each = ", ".join(f"{name} {loss:.4f}" for name, loss in schedule_losses(best).items())
        steps = max(row["step"] for row in log.data)
        rows.append({"log": log.name, "steps": steps, "best": best.get("cross_entropy"), "each": each, **best})
    charts = [loss_chart(log.data, log.name, by_schedule=False) for log in logs]
    words = [f"{row['log']}: best on dev {row['best']:.4f} at step {row['step']}" for row in rows if row["best"]]
    figure = partial(chart_figure, charts, columns=4, size=(2.65, 2.1))
    label = f"Cross-entropy per response token. {'; '.join(words)}"
    picture = Picture(figure, "Means of training steps, and losses on the dev set, the mean of its schedules", label)
    return Section("Loss while tuning", pictures=[picture], tables=[table("Losses on the dev set", rows, _DEV)])


# ---------------------------------------------------------------------- how results were made


def _environments(sources: Sequence[Source]) -> Section:
    """Machine, versions, commit and date of every source that says where it was measured."""
    rows = []
    for source in sources:
        document = source.data.data if isinstance(source.data, Run) else source.data
        found = document.get("environment") if isinstance(document, Mapping) else None
        if isinstance(found, Mapping):
            commit = str(found.get("commit") or "–")[:10] + ("*" if found.get("uncommitted_changes") else "")
            machine = f"{found.get('cores', '?')} cores of {found.get('cpu', '?')}"
            machine = ", ".join([machine, *map(str, found.get("gpus") or [])])
            rows.append({"result": source.name, **found, "commit": commit, "machine": machine})
    caption = "Compare times of one result; between machines and days only ratios"
    return Section("Environment", tables=[table(caption, rows, _ENVIRONMENT)] if rows else [])


def _settings(sources: Sequence[Source]) -> Section:
    """Everything that runs say about themselves."""
    details = []
    for source in of_kind(sources, "evaluation"):
        run = source.data
        kept = {name: run.data[name] for name in ("config", "environment")}
        kept["signatures"] = {name: entry["signature"] for name, entry in run.data["metrics"].items()}
        details.append((run.name, json.dumps(kept, indent=1, ensure_ascii=False)))
    return Section("How each run was made", details=details)
