"""A page as data, and the one HTML document that it becomes (Jinja2; every text is escaped by it).

Knows nothing about results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from skipdecode.errors import MissingExtraError
from skipdecode.reporting.plots.output import svg

__all__ = ["Picture", "Pieces", "Sample", "Section", "Table", "Tile", "render", "table"]

Pieces = Sequence[tuple[str, bool]]
"""A text in pieces, each with whether it is to be marked."""
Sample = tuple[str, Sequence[tuple[str, Pieces]]]
"""A prompt and what came of it, side by side: each output's name and its pieces."""
Tile = tuple[str, str]
"""A figure that stands out, with what it is."""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of each names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    """A figure of `skipdecode.reporting.plots`.

    Parameters
    ----------
    caption : str
        Text under the figure.
    label : str
        What it shows, in words, for those who do not see it.
    numbers : Table, optional
        What was drawn.
    wide : bool
        Take the whole width of the page.
    """

    figure: Any
    caption: str
    label: str
    numbers: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading.

    Pictures after the first `shown` are behind a line that opens them, and so is each of `details`, preformatted texts.
    """

    heading: str
    intro: str = ""
    pictures: Sequence[Picture] = ()
    shown: int | None = None
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    details: Sequence[tuple[str, str]] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.tables or self.samples or self.details)


def table(caption: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """Records as a table.

    Parameters
    ----------
    columns : mapping of str to str
        By heading, the pattern of `str.format` that makes a cell from a record; where a field is missing, None or of
        another type, the cell is a dash.
    """
    return Table(caption, list(columns), [[_cell(pattern, row) for pattern in columns.values()] for row in rows])


def _cell(pattern: str, row: Mapping[str, Any]) -> str:
    try:
        return pattern.format_map({name: value for name, value in row.items() if value is not None})
    except (KeyError, TypeError, ValueError):
        return "–"


def render(title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section]) -> str:
    """The page, the same text for the same parts. Empty sections are left out.

    Raises
    ------
    MissingExtraError
        Jinja2 or matplotlib is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError:
        raise MissingExtraError("an HTML report", "report") from None
    environment = Environment(
        loader=PackageLoader("skipdecode.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = itertools.count(1)

    def draw(picture: Picture) -> Markup:
        # Under an id of its own; made by `plots`, which escapes its texts.
        return Markup(svg(picture.figure, f"p{next(numbers)}", picture.label))

    style = (resources.files("skipdecode.reporting") / "page.css").read_text(encoding="utf-8")
    shown = [section for section in sections if section]
    page = environment.get_template("page.html")
    return page.render(title=title, subtitle=subtitle, tiles=tiles, sections=shown, style=Markup(style), draw=draw)
