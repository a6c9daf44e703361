"""The section of outputs side by side."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from skipdecode.evaluation.results import Run
from skipdecode.reporting.page import Pieces, Sample, Section
from skipdecode.reporting.results import Group

__all__ = ["sample_section"]

_SHOWN_TEXT = 1200
_MARKED = "Marked: words that differ from the output of the same model at full depth."


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
