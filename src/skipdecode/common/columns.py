"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPEEDUPS = {
    "request": "time of prompt and steps together",
    "decode": "time of the steps after the prompt",
    "nominal": "all layers / layers that a new token runs",
}
"""The three speed-ups, with what each of them compares."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column is left-aligned, the others are right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in (header, *rows)
    ]


def figures(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]], *, absent: str = "-") -> list[str]:
    """A table of records: `columns` has a format for each heading, such as ``{seconds:.1f} s``.

    A cell is `absent` if a field is missing or None. A column without any value is left out.
    """

    def cell(form: str, row: Mapping[str, Any]) -> str:
        try:
            return form.format_map(row)
        except (KeyError, TypeError):  # None has no format
            return absent

    cells = {head: [cell(form, row) for row in rows] for head, form in columns.items()}
    shown = {head: column for head, column in cells.items() if set(column) != {absent}}
    return table([*shown], list(zip(*shown.values(), strict=True)))


def speedups(header: Sequence[str], cells: Mapping[str, Sequence[str]]) -> list[str]:
    """A table of the three speed-ups; `cells` has the cells of "request", "decode" and "nominal"."""
    last = max(map(len, SPEEDUPS.values()))
    rows = [[name, *cells[name], what.ljust(last)] for name, what in SPEEDUPS.items()]
    return table(["speed-up", *header, "compares".ljust(last)], rows)
