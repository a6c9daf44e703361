"""Results that no other section draws but that say where they are from: their single figures, and the document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skipdecode.reporting.page import Details, Section, Table
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["other_sections"]

_LEFT_OUT = ("environment", "config")
_MOST = 60


def other_sections(sources: Sequence[Source]) -> list[Section]:
    """One for each."""
    return [_other(source) for source in of_kind(sources, "other")]


def _other(source: Source) -> Section:
    rows = list(_figures(source.data))
    caption = f"Figures of {source.name}" + (f", the first {_MOST} of {len(rows)}" if len(rows) > _MOST else "")
    table = Table(caption, ["figure", "value"], rows[:_MOST])
    whole = Details("The whole document", json.dumps(source.data, indent=1, ensure_ascii=False))
    return Section(f"Other results: {source.name}", tables=[table] if rows else [], details=[whole])


def _figures(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Single numbers of a document with where they stand; of lists only those of objects."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _LEFT_OUT:
                yield from _figures(inner, f"{path} / {key}" if path else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            if isinstance(inner, Mapping):
                yield from _figures(inner, f"{path} {number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, f"{value:.6g}"
