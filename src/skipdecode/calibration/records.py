"""The records of a calibration: records to learn from, held-out records, and records for the fit."""

from __future__ import annotations

import random
from collections.abc import Sequence

from skipdecode.common.progress import note
from skipdecode.data.prompts import Example

__all__ = ["draw_records", "records_for_fit"]


def draw_records(
    examples: Sequence[Example], records: int, held_out: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Records to learn from, and held-out records with other prompts; the same for the same seed."""
    by_prompt: dict[tuple[int, ...], list[Example]] = {}
    for example in examples:
        by_prompt.setdefault(example.prompt, []).append(example)
    groups = list(by_prompt.values())
    random.Random(seed).shuffle(groups)
    learn, rest = _take(groups, records)
    check, _ = _take(rest, held_out)
    if len(check) < held_out:
        note(f"only {len(check)} of {held_out} records are held out: there are not enough other prompts")
    return learn, check


def _take(groups: Sequence[list[Example]], count: int) -> tuple[list[Example], list[list[Example]]]:
    """The first `count` records, from as many prompts as possible, and the groups of which none was taken."""
    taken: list[Example] = []
    for rank in range(max(map(len, groups), default=0)):
        for used, group in enumerate(groups):
            if len(taken) == count:
                return taken, list(groups[used if rank == 0 else len(groups) :])
            if rank < len(group):
                taken.append(group[rank])
    return taken, []


def records_for_fit(
    examples: Sequence[Example], learn: Sequence[Example], check: Sequence[Example], most: int
) -> list[Example]:
    """At most `most` records, those to learn from first, in the order of their lengths; none has a held-out prompt."""
    kept = {example.prompt for example in check}
    others = [e for e in examples if e.prompt not in kept and e not in learn]
    return sorted([*learn, *others][:most], key=lambda e: (len(e.prompt), len(e.response)))
