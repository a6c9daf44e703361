"""The contents of a report: a section for each kind of source."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from skipdecode.evaluation.compare import Pair
from skipdecode.evaluation.results import Run
from skipdecode.reporting.charts import chart_figure, grouped
from skipdecode.reporting.kept import kept_chart, kept_columns, minutes_chart
from skipdecode.reporting.page import Card, Picture, Pieces, Sample, Section, render, table
from skipdecode.reporting.plots import (
    calibration_figure,
    depth_figure,
    loss_chart,
    schedule_losses,
    speed_figure,
)
from skipdecode.reporting.quality import best_first, pair_sections, quality_card, quality_section
from skipdecode.reporting.results import Group, groups_of
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import Schedule

__all__ = ["BENCH", "SELF_GENERATED", "VERDICTS", "html_report"]

_SHOWN_TEXT = 1200
_MARKED = "Marked: words that differ from the output of the same model at full depth."
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
"""Columns of a table of `skipdecode bench`, with their formats."""

_DEPTH = (
    "Layers that run at each generation position. A layer skipped at a position is skipped at all later ones, so no "
    "cached key or value is missing. Titles: names of the schedule, layers of a token, nominal speed-up"
)
_CALIBRATION = (
    "importance of each layer on these records; layers that run at each position; loss as layers are skipped at all "
    "positions, in the learned order"
)
VERDICTS = {
    "schedule": "{name}",
    "speed-up": "{speedup:.2f}x",
    "request speed-up": "{request_speedup:.2f}x",
    "decode speed-up": "{decode_speedup:.2f}x",
    "prompt layers": "{prompt_layers}",
    "mean layers": "{mean_layers:.1f}",
    "loss": "{measured:.4f}",
    "held out": "{held_out:.4f}",
}
"""Columns of a table of `skipdecode calibrate`, with their formats."""

SELF_GENERATED = {
    "schedule": "{name}",
    "request": "{measured_speedup_with_prompt:.2f}x",
    "decode": "{measured_speedup:.2f}x",
    "nominal": "{nominal_speedup:.2f}x",
    "KL": "{kl[estimate]:.3f}",
    "same token": "{top1_agreement[estimate]:.1f}%",
    "perplexity": "{perplexity:.2f}",
    "of base model": "{of_base[estimate]:.3f} [{of_base[low]:.3f}, {of_base[high]:.3f}]",
    "instructions": "{instructions[followed]:.1%}",
}
"""Columns of a table of `skipdecode eval --self`, with their formats."""

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
    """One self-contained HTML document; the same text for the same arguments.

    Parameters
    ----------
    sources : sequence of Source
        One or more.
    pairs : sequence of Pair
        Compared runs, from `compare_runs`.
    progress : bool
        Show a progress bar.

    Raises
    ------
    MissingExtraError
        matplotlib or Jinja2 is not installed.
    """
    groups = best_first(groups_of(sources))
    sections = [*map(quality_section, groups), *pair_sections(pairs, sources)]
    sections += map(_sample_section, groups)
    sections += [_prepared(source) for source in of_kind(sources, "prepared")]
    sections += [_self_generated(source) for source in of_kind(sources, "self-generated")]
    sections += [_bench(source) for source in of_kind(sources, "bench")]
    sections.append(_schedules(sources))
    sections += [_calibration(source) for source in of_kind(sources, "calibration")]
    sections += [_tuning(of_kind(sources, "tuning")), _environments(sources), _settings(sources)]
    cards = [*map(quality_card, groups), *_speed_cards(sources)]
    return render(title, [source.name for source in sources], cards, sections, progress=progress)


def _self_generated(source: Source) -> Section:
    """A result of `skipdecode eval --self`."""
    caption = f"{source.data['n']} texts of each schedule; perplexity: of the base model at full depth on these texts"
    return Section(f"Self-generated text: {source.name}", tables=[table(caption, source.data["rows"], SELF_GENERATED)])


def _prepared(source: Source) -> Section:
    """A result of `skipdecode prepare`."""
    rows = source.data["rows"]
    charts = [kept_chart(rows), minutes_chart(source.data["kept_by_minutes"])]
    picture = Picture(
        partial(chart_figure, charts, columns=2),
        "The smallest share of a score at full depth: of each schedule by its speed-up, and of the target by the "
        "minutes of layer order, fit and tuning (0: fit alone)",
    )
    kept = table("Kept: the smallest share of a score at full depth", rows, kept_columns(rows))
    return Section(f"Prepared: {source.name}", pictures=[picture], tables=[kept])


# ---------------------------------------------------------------------- speed


def _bench(source: Source) -> Section:
    """A result of `skipdecode bench`."""
    data, rows = source.data, source.data["rows"]
    rates = "".join(f", {rate:.0f} GFLOP/s in {kind}" for kind, rate in data.get("products_gflop_s", {}).items())
    caption = (
        "Decode speed-up of each engine over its own full depth (faint: bound by bytes), and share of the limit of a "
        f"step, which is the larger of its bytes over the read bandwidth ({data['bandwidth_gb_s']:.1f} GB/s) and its "
        f"operations over the rate of a large matrix product{rates}"
    )
    columns = {name: form for name, form in BENCH.items() if name != "request" or rows[0].get("request_speedup")}
    command = data.get("config", {}).get("command")
    made_by = f"{source.name}: {command}" if command else source.name
    picture = Picture(partial(speed_figure, rows), caption)
    return Section(f"Engines: {_subject(source)}", pictures=[picture], tables=[table(made_by, rows, columns)])


def _subject(source: Source) -> str:
    config = source.data.get("config", {})
    return PurePath(str(config.get("model") or config.get("geometry") or source.name)).name


def _speed_cards(sources: Sequence[Source]) -> list[Card]:
    """A card for each result of `skipdecode bench`: the fastest engine at full depth."""
    cards = []
    for source in of_kind(sources, "bench"):
        over = [r for r in source.data["rows"] if r["nominal_speedup"] == 1 and r.get("speedup_over_transformers")]
        best = max(over, key=lambda r: float(r["speedup_over_transformers"]), default=None)
        if best is not None and best["speedup_over_transformers"] > 1:
            how = "{engine} engine, batch {batch}; without a measurement of quality".format_map(best)
            answer = f"{best['speedup_over_transformers']:.1f}x", "transformers' decode speed at full depth", [how]
            cpu = str(source.data.get("environment", {}).get("cpu", ""))
            cards.append(Card(f"Engine on {_subject(source)}", [answer], cpu))
    return cards


# ---------------------------------------------------------------------- schedules


def _schedules(sources: Sequence[Source]) -> Section:
    """Each schedule of the sources once, under all of its names."""
    methods: list[Any] = [s.data.data["config"].get("method", {}) for s in of_kind(sources, "evaluation")]
    schedules = [s.data for s in of_kind(sources, "schedule")]
    schedules += [Schedule.from_dict(method["schedule"]) for method in methods if method.get("schedule")]
    named = grouped((s for s in schedules if not s.is_full), lambda s: replace(s, name="any"))
    titles: dict[str, Schedule] = {}
    for schedule, same in named.items():
        first, last = schedule.budgets[0], schedule.budgets[-1]
        depth = f"{first} of {schedule.num_layers}" if first == last else f"{first} to {last} of {schedule.num_layers}"
        names = ", ".join(dict.fromkeys(s.name for s in same))
        titles[f"{names}\n{depth} layers, {schedule.nominal_speedup:.2f}x"] = schedule
    pictures = [Picture(partial(depth_figure, titles), _DEPTH)] if titles else []
    return Section("Which layers run where", pictures=pictures)


def _calibration(source: Source) -> Section:
    """A result of `skipdecode calibrate`."""
    data = source.data
    losses = f"Loss per response token on {data.get('records', '?')} records, teacher-forced"
    return Section(
        f"Calibration: {source.name}",
        pictures=[Picture(partial(calibration_figure, data), f"{data['schedule']['name']}: {_CALIBRATION}")],
        tables=[table(losses, data["verdicts"], VERDICTS)],
    )


def _tuning(logs: Sequence[Source]) -> Section:
    """The losses in the logs of `skipdecode tune`."""
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
    figure = partial(chart_figure, charts, columns=4, size=(2.65, 2.1))
    picture = Picture(figure, "Cross-entropy per token: running mean of training steps; dev set, mean over schedules")
    return Section("Loss while tuning", pictures=[picture], tables=[table("Losses on the dev set", rows, _DEV)])


# ---------------------------------------------------------------------- how results were made


def _environments(sources: Sequence[Source]) -> Section:
    """Machine, versions, commit and date of each source that has an environment."""
    rows = []
    for source in sources:
        document = source.data.data if isinstance(source.data, Run) else source.data
        found = document.get("environment") if isinstance(document, Mapping) else None
        if isinstance(found, Mapping):
            commit = str(found.get("commit") or "–")[:10] + ("*" if found.get("uncommitted_changes") else "")
            machine = f"{found.get('cores', '?')} cores of {found.get('cpu', '?')}"
            machine = ", ".join([machine, *map(str, found.get("gpus") or [])])
            rows.append({"result": source.name, **found, "commit": commit, "machine": machine})
    caption = "Compare times within one result only; between machines or days compare ratios"
    return Section("Environment", tables=[table(caption, rows, _ENVIRONMENT)] if rows else [])


def _settings(sources: Sequence[Source]) -> Section:
    """The settings of each evaluation run."""
    details = []
    for source in of_kind(sources, "evaluation"):
        run = source.data
        kept = {name: run.data[name] for name in ("config", "environment")}
        kept["signatures"] = {name: entry["signature"] for name, entry in run.data["metrics"].items()}
        details.append((run.name, json.dumps(kept, indent=1, ensure_ascii=False)))
    return Section("How each run was made", details=details)


# ---------------------------------------------------------------------- outputs side by side


def _sample_section(group: Group) -> Section:
    """The sample records that all runs have, with the outputs of all runs."""
    return Section(f"Outputs side by side: {group.title}", _MARKED, samples=_samples(group.runs))


def _samples(runs: Sequence[Run]) -> list[Sample]:
    by_id = [{sample["id"]: sample for sample in run.data["samples"]} for run in runs]
    samples: list[Sample] = []
    for identity, first in by_id[0].items():
        if all(identity in found for found in by_id):
            outputs: list[tuple[str, Pieces]] = [("reference", [(_short(first["reference"]), False)])]
            for run, found in zip(runs, by_id, strict=True):
                full = found[identity].get("full_output")
                outputs.append((run.name, _marked(_short(found[identity]["output"]), full)))
            samples.append((_short(first["prompt"]), outputs))
    return samples


def _marked(text: str, full: str | None) -> Pieces:
    """The text in pieces; those that `full` does not have are marked."""
    if full is None:
        return [(text, False)]
    # Words and the white space between them: the pieces together are the text.
    words, expected = re.findall(r"\s+|\S+", text), re.findall(r"\s+|\S+", full)
    changes = difflib.SequenceMatcher(None, words, expected, autojunk=False).get_opcodes()
    return [("".join(words[low:high]), tag != "equal") for tag, low, high, _, _ in changes if high > low]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + " …"
