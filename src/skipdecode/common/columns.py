"""Tables and texts side by side, for a terminal."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

_LEAST_WIDTH = 22
_GAP = 2
SPEEDUPS = {
    "request": "time of prompt and steps together",
    "decode": "time of the steps after the prompt",
    "nominal": "all layers / layers that a new token runs",
}
"""The three speed-ups, with what each of them compares."""
_NO_GLYPH = "\N{WHITE SQUARE}"


def side_by_side(titles: Sequence[str], texts: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` characters with `texts` under their `titles`; one below the other if `width` is small.

    White space is collapsed. Characters that are not one column wide or not printable are replaced by a square.
    """
    column = (width - _GAP * (len(texts) - 1)) // len(texts)
    shown = [_one_line(t) or "(no text)" for t in texts]
    if column < _LEAST_WIDTH:
        return [
            line
            for title, text in zip(titles, shown, strict=True)
            for line in textwrap.wrap(f"{title}: {text}", width, subsequent_indent="    ")
        ]
    cells = [[t[:column], "-" * column, *textwrap.wrap(text, column)] for t, text in zip(titles, shown, strict=True)]
    height = max(map(len, cells))
    gap = " " * _GAP
    return [
        gap.join((cell[row] if row < len(cell) else "").ljust(column) for cell in cells).rstrip()
        for row in range(height)
    ]


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


def _one_line(text: str) -> str:
    return "".join(c if _is_plain(c) else _NO_GLYPH for c in " ".join(text.split()))


def _is_plain(character: str) -> bool:
    wide = unicodedata.east_asian_width(character) in "WF" or unicodedata.combining(character)
    return character.isprintable() and not wide
