"""Sections on the outputs of runs: scores by length, outputs side by side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from skipdecode.evaluation.results import Run
from skipdecode.reporting.charts import Chart, Point, Series, chart_figure
from skipdecode.reporting.page import Picture, Pieces, Sample, Section
from skipdecode.reporting.quality import METRIC_NAMES
from skipdecode.reporting.results import Group

__all__ = ["length_section", "sample_section"]

_SHOWN_TEXT = 1200
_AXES = {"prompt_tokens": "By prompt length", "reference_tokens": "By reference length"}
_MARKED = "Marked: words that differ from the output of the same model at full depth."


def length_section(group: Group) -> Section:
    """The first metric by quarters of the records, in order of length; a chart for each kind of length."""
    heading = f"Scores by length: {group.title}"
    metric = next((m for m in METRIC_NAMES if any(m in run.data["metrics"] for run in group.runs)), "")
    charts = [chart for axis in _AXES if (chart := _lengths(group.runs, axis, metric)).series]
    if not charts:
        return Section(heading)
    figure = partial(chart_figure, charts, columns=2, size=(5.2, 3.2))
    caption = f"{METRIC_NAMES[metric]} by quarters of the records, shortest to longest"
    return Section(heading, pictures=[Picture(figure, caption)])


def _lengths(runs: Sequence[Run], axis: str, metric: str) -> Chart:
    by_run = {run.name: run.data["buckets"].get(axis, []) for run in runs}
    series = []
    for name, buckets in by_run.items():
        points = [Point(i, b["metrics"][metric]) for i, b in enumerate(buckets) if metric in b["metrics"]]
        series += [Series(name, points)] if points else []
    longest: list[dict[str, Any]] = max(by_run.values(), key=len, default=[])
    ticks = [_range(bucket) for bucket in longest]
    return Chart(series, axis.replace("_", " "), METRIC_NAMES.get(metric, ""), _AXES[axis], ticks=ticks)


def _range(bucket: dict[str, Any]) -> str:
    low, high = bucket["low"], bucket["high"]
    return f"{low if low == high else f'{low}-{high}'}\n(n={bucket['n']})"


def sample_section(group: Group) -> Section:
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
