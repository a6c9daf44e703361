"""Sections on what runs wrote: scores by length, samples side by side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from skipdecode.evaluation.results import Run
from skipdecode.reporting.page import Picture, Pieces, Sample, Section
from skipdecode.reporting.plots.lines import Chart, Point, Series
from skipdecode.reporting.quality import METRIC_NAMES, headlines
from skipdecode.reporting.results import Group

__all__ = ["length_sections", "sample_sections"]

_SHOWN_TEXT = 1200
_AXES = {"prompt_tokens": "By prompt length", "reference_tokens": "By reference length"}
_MARKED = "Marked: words that the same model at full depth did not write there."


def length_sections(group: Group) -> list[Section]:
    """Scores in quarters of the records, by length."""
    sections = []
    metrics = [m for m in METRIC_NAMES if any(m in run.data["metrics"] for run in group.runs)]
    for axis, heading in _AXES.items():
        pictures = [picture for m in metrics if (picture := _lengths(group.runs, axis, m)) is not None]
        sections.append(Section(f"{heading}: {group.title}", pictures=pictures, shown=headlines(metrics)))
    return sections


def _lengths(runs: Sequence[Run], axis: str, metric: str) -> Picture | None:
    lines = [(run.name, run.data["buckets"].get(axis, [])) for run in runs]
    lines = [(name, buckets) for name, buckets in lines if any(metric in b["metrics"] for b in buckets)]
    if not lines:
        return None
    longest = max((buckets for _, buckets in lines), key=len)
    series = [
        Series(name, [Point(i, b["metrics"][metric]) for i, b in enumerate(buckets) if metric in b["metrics"]])
        for name, buckets in lines
    ]
    name, unit = METRIC_NAMES[metric], axis.replace("_", " ")
    chart = Chart(series, unit, name, ticks=[_range(b) for b in longest], names=[run.name for run in runs])
    words = "; ".join(f"{s.name}: {', '.join(f'{p.y:.1f}' for p in s.points)}" for s in series)
    return Picture(chart, f"{name} by {unit}", f"{name} by {unit}, shortest to longest. {words}")


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return f"{low if low == high else f'{low}-{high}'}\n(n={bucket['n']})"


def sample_sections(group: Group) -> list[Section]:
    """Records that the runs have in common, every output beside the others."""
    samples = _samples(group.runs) if group.runs else []
    return [Section(f"Outputs side by side: {group.title}", _MARKED, samples=samples)]


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
    """The text in pieces, those marked that `full` does not have."""
    if full is None:
        return [(text, False)]
    # Words and the white space between them, so that the pieces together are the text.
    words, expected = re.findall(r"\s+|\S+", text), re.findall(r"\s+|\S+", full)
    changes = difflib.SequenceMatcher(None, words, expected, autojunk=False).get_opcodes()
    return [("".join(words[low:high]), tag != "equal") for tag, low, high, _, _ in changes if high > low]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + " …"
