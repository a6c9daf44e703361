"""Sections that hide nothing: results that no other section draws, where the numbers are from, how runs were made."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skipdecode.evaluation.results import Run
from skipdecode.reporting.page import Section, Table, table
from skipdecode.reporting.sources import NEEDED, Source, of_kind

__all__ = ["environment_sections", "other_sections", "settings_sections"]

_DRAWN = (*NEEDED, "evaluation", "schedule", "tuning")
_LEFT_OUT = ("kind", "format", "benchmark", "environment", "config")
_MOST = 60
_ENVIRONMENT = {
    "result": "{result}",
    "date": "{date:.10}",
    "commit": "{commit}",
    "machine": "{machine}",
    "threads": "{threads}",
    "system": "{os}, Python {python}",
    **{name: f"{{packages[{name}]}}" for name in ("skipdecode", "torch", "transformers")},
}


def other_sections(sources: Sequence[Source]) -> list[Section]:
    """The single figures of each result of another kind."""
    return [_other(source) for source in sources if source.kind not in _DRAWN]


def _other(source: Source) -> Section:
    rows = list(_figures(source.data))
    caption = f"Figures of {source.name}" + (f", the first {_MOST} of {len(rows)}" if len(rows) > _MOST else "")
    tables = [Table(caption, ["figure", "value"], rows[:_MOST])] if rows else []
    return Section(f"Other results: {source.name}", tables=tables)


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


def environment_sections(sources: Sequence[Source]) -> list[Section]:
    """Machine, versions, commit and date of every source that says where it was measured."""
    rows = []
    for source in sources:
        document = source.data.data if isinstance(source.data, Run) else source.data
        found = document.get("environment") if isinstance(document, Mapping) else None
        if isinstance(found, Mapping):
            rows.append({"result": source.name, **found, **_where(found)})
    caption = "Compare times of one result; between machines and days only ratios"
    return [Section("Environment", tables=[table(caption, rows, _ENVIRONMENT)] if rows else [])]


def _where(found: Mapping[str, Any]) -> dict[str, str]:
    commit = str(found.get("commit") or "–")[:10] + ("*" if found.get("uncommitted_changes") else "")
    machine = [f"{found.get('cores', '?')} cores of {found.get('cpu', '?')}", *map(str, found.get("gpus") or [])]
    return {"commit": commit, "machine": ", ".join(machine)}


def settings_sections(sources: Sequence[Source]) -> list[Section]:
    """Everything that runs say about themselves."""
    details = []
    for source in of_kind(sources, "evaluation"):
        run = source.data
        kept = {name: run.data[name] for name in ("config", "environment")}
        kept["signatures"] = {name: entry["signature"] for name, entry in run.data["metrics"].items()}
        details.append((run.name, json.dumps(kept, indent=1, ensure_ascii=False)))
    return [Section("How each run was made", details=details)]
