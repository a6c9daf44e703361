"""Where the numbers are from: machine, versions, commit and date of every source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.evaluation.results import Run
from skipdecode.reporting.page import Section, Table
from skipdecode.reporting.sources import Source

__all__ = ["machines_section"]

_PACKAGES = ("skipdecode", "torch", "transformers")


def machines_section(sources: Sequence[Source]) -> Section:
    """A row a source that says where it was measured."""
    known = [(s.name, found) for s in sources if (found := _environment(s.data))]
    head = ["result", "date", "commit", "machine", "threads", "system", *_PACKAGES]
    table = Table("Compare times of one result; between machines and days only ratios", head, [_row(*k) for k in known])
    return Section("Environment", tables=[table] if known else [])


def _environment(data: Any) -> Mapping[str, Any] | None:
    document = data.data if isinstance(data, Run) else data
    found = document.get("environment") if isinstance(document, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _row(name: str, found: Mapping[str, Any]) -> list[str]:
    commit = str(found.get("commit") or "–")[:10] + ("*" if found.get("uncommitted_changes") else "")
    gpus = found.get("gpus") or []
    machine = ", ".join([f"{found.get('cores', '?')} cores of {found.get('cpu', '?')}", *map(str, gpus)])
    packages = found.get("packages", {})
    return [
        name,
        str(found.get("date", "–"))[:10],
        commit,
        machine,
        str(found.get("threads", "–")),
        f"{found.get('os', '–')}, Python {found.get('python', '–')}",
        *(str(packages.get(p, "–")) for p in _PACKAGES),
    ]
