"""Tables in Markdown, which also read well in a terminal."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WIDTH = 100
"""Columns that a table has at most."""
_ABSENT = "-"
_SPEEDUPS = {
    "request": "time of prompt and steps together",
    "decode": "time of the steps after the prompt",
    "nominal": "all layers / layers of a new token",
}


class Printed:
    """Base of a result that prints itself, also in a notebook."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of one table, or of several that each repeat the first column, none wider than `WIDTH`."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) + 3 for column in zip(*cells, strict=True)]
    # As few parts as fit, of about equally many columns.
    columns = len(widths) - 1
    for count in range(1, columns + 1):
        parts = [[0, *range(1 + columns * i // count, 1 + columns * (i + 1) // count)] for i in range(count)]
        if all(1 + sum(widths[i] for i in part) <= WIDTH for part in parts):
            break
    lines: list[str] = []
    for part in parts:
        head, *shown = ["".join(f"| {row[i].ljust(widths[i] - 2)}" for i in part) + "|" for row in cells]
        rule = "".join("|" + "-" * (widths[i] - 1) for i in part) + "|"
        lines += [*([""] if lines else []), head, rule, *shown]
    return lines


def figures(columns: Mapping[str, str | Callable[[Any], str]], rows: Sequence[Any]) -> list[str]:
    """A table of records: `columns` has a function or a format for each heading, such as ``{seconds:.1f} s``.

    A cell without a value (a field is missing or None) is "-". Columns and rows without any value are left out.
    """

    def cell(form: str | Callable[[Any], str], row: Any) -> str:
        try:
            return form.format_map(row) if isinstance(form, str) else form(row)
        except (KeyError, TypeError):  # None has no format
            return _ABSENT

    cells = [[cell(form, row) for form in columns.values()] for row in rows]
    cells = [row for row in cells if set(row[1:]) - {_ABSENT}]
    shown = [i for i in range(len(columns)) if {row[i] for row in cells} - {_ABSENT}]
    return markdown([[row[i] for i in shown] for row in ([*columns], *cells)]) if shown else []


def byte_size(count: float) -> str:
    """A number of bytes in the largest decimal unit of which there is at least one, with three digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} bytes"


def speedups(header: Sequence[str], cells: Mapping[str, Sequence[str]]) -> list[str]:
    """A table of the three speed-ups; `cells` has the cells of "request", "decode" and "nominal"."""
    rows = [[name, *cells[name], what] for name, what in _SPEEDUPS.items()]
    return markdown([["speed-up", *header, "compares"], *rows])
