"""Sections on what runs wrote: scores by length, samples side by side, how each run was made."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any

from skipdecode.evaluation.results import Run
from skipdecode.reporting.outcomes import HEADLINE, METRIC_NAMES
from skipdecode.reporting.page import Details, Output, Picture, Sample, Section
from skipdecode.reporting.plots import Point, Series, line_figure
from skipdecode.schedule import curve_name

__all__ = ["length_sections", "sample_sections", "settings_section"]

_SHOWN_TEXT = 1200
_AXES = {"prompt_tokens": "By prompt length", "reference_tokens": "By reference length"}


def length_sections(runs: Sequence[Run]) -> list[Section]:
    """Scores in quarters of the records, by length."""
    sections = []
    for group in _same_data(runs):
        for axis, heading in _AXES.items():
            metrics = [m for m in METRIC_NAMES if any(m in r.data["metrics"] for r in group)]
            drawn = [p for p in (_lengths(group, axis, m) for m in metrics) if p is not None]
            shown = sum(metric in HEADLINE for metric in metrics) or 1
            sections.append(Section(f"{heading}: {_task(group)}", pictures=drawn[:shown], more=drawn[shown:]))
    return sections


def _lengths(runs: Sequence[Run], axis: str, metric: str) -> Picture | None:
    lines = [(run.name, run.data["buckets"].get(axis, [])) for run in runs]
    lines = [(name, buckets) for name, buckets in lines if any(metric in b["metrics"] for b in buckets)]
    if not lines:
        return None
    longest = max((buckets for _, buckets in lines), key=len)
    series = [
        Series(name, tuple(Point(i, b["metrics"][metric]) for i, b in enumerate(buckets) if metric in b["metrics"]))
        for name, buckets in lines
    ]
    name, unit = METRIC_NAMES[metric], axis.replace("_", " ")
    figure = line_figure(series, unit, name, ticks=[_range(b) for b in longest])
    words = "; ".join(f"{s.name}: {', '.join(f'{p.y:.1f}' for p in s.points)}" for s in series)
    return Picture(figure, f"{name} by {unit}", f"{name} by {unit}, shortest to longest. {words}")


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return f"{low if low == high else f'{low}-{high}'}\n(n={bucket['n']})"


def _same_data(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=_place):
        groups.setdefault(str(run.data["config"].get("data_sha256")), []).append(run)
    return list(groups.values())


def _place(run: Run) -> tuple[bool, str, float]:
    """Full depth first, then curve by curve."""
    full = run.data["config"].get("method", {}).get("name") == "full"
    return not full, curve_name(run.name), run.data.get("nominal_speedup") or 0.0


def _task(runs: Sequence[Run]) -> str:
    return str(runs[0].data["config"].get("task", {}).get("name", ""))


def sample_sections(runs: Sequence[Run]) -> list[Section]:
    """Records that the runs of one data set have in common, every output beside the others."""
    return [_samples(group) for group in _same_data(runs)]


def _samples(runs: Sequence[Run]) -> Section:
    by_id = [{sample["id"]: sample for sample in run.data["samples"]} for run in runs]
    samples = []
    for identity, first in by_id[0].items():
        if all(identity in found for found in by_id):
            outputs = [Output("reference", [(_short(first["reference"]), False)])]
            for run, found in zip(runs, by_id, strict=True):
                full = found[identity].get("full_output")
                outputs.append(Output(run.name, _marked(_short(found[identity]["output"]), full)))
            samples.append(Sample(_short(first["prompt"]), outputs))
    intro = "Marked: words that the same model at full depth did not write there."
    return Section(f"Outputs side by side: {_task(runs)}", intro, samples=samples)


def _marked(text: str, full: str | None) -> list[tuple[str, bool]]:
    """The text in pieces, those marked that `full` does not have."""
    if full is None:
        return [(text, False)]
    # Words and the white space between them, so that the pieces together are the text.
    words, expected = re.findall(r"\s+|\S+", text), re.findall(r"\s+|\S+", full)
    changes = difflib.SequenceMatcher(None, words, expected, autojunk=False).get_opcodes()
    return [("".join(words[low:high]), tag != "equal") for tag, low, high, _, _ in changes if high > low]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + " …"


def settings_section(runs: Sequence[Run]) -> Section:
    """Everything a run says about itself."""
    details = []
    for run in runs:
        kept = {name: run.data[name] for name in ("config", "environment")}
        signatures = {name: entry["signature"] for name, entry in run.data["metrics"].items()}
        text = json.dumps({**kept, "signatures": signatures}, indent=1, ensure_ascii=False)
        details.append(Details(run.name, text))
    return Section("How each run was made", details=details)
