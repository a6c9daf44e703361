"""A page as data, and the one HTML document that it becomes (Jinja2; every text is escaped by it).

Knows nothing about results.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from skipdecode.common.progress import progress_bar
from skipdecode.errors import MissingExtraError
from skipdecode.reporting.charts import svg

__all__ = ["Card", "Picture", "Pieces", "Sample", "Section", "Table", "render", "table"]

Pieces = Sequence[tuple[str, bool]]
"""A text in pieces, each with whether it is to be marked."""
Sample = tuple[str, Sequence[tuple[str, Pieces]]]
"""A prompt and what came of it, side by side: each output's name and its pieces."""


@dataclass(frozen=True)
class Card:
    """Answers for the first screen, the first one the largest: each a figure, what it is, and lines about it."""

    heading: str
    answers: Sequence[tuple[str, str, Sequence[str]]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of each names the row. So many of the first columns stay in view, two on a phone."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    pinned: int = 1


@dataclass(frozen=True)
class Picture:
    """A figure over the whole width of the page.

    Parameters
    ----------
    figure : callable
        Makes a figure of matplotlib.
    caption : str
        Text under the figure.
    label : str
        What it shows, in words, for those who do not see it.
    """

    figure: Callable[[], Any]
    caption: str
    label: str


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading; `details` are preformatted texts behind a line that opens them."""

    heading: str
    intro: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    details: Sequence[tuple[str, str]] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.tables or self.samples or self.details)


def table(caption: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], *, pinned: int = 1) -> Table:
    """Records as a table.

    Parameters
    ----------
    columns : mapping of str to str
        By heading, the pattern of `str.format` that makes a cell from a record; where a field is missing, None or of
        another type, the cell is a dash.
    """
    cells = [[_cell(pattern, row) for pattern in columns.values()] for row in rows]
    return Table(caption, list(columns), cells, pinned)


def _cell(pattern: str, row: Mapping[str, Any]) -> str:
    try:
        return pattern.format_map({name: value for name, value in row.items() if value is not None})
    except (KeyError, TypeError, ValueError):
        return "–"


def render(
    title: str, sources: Sequence[str], cards: Sequence[Card], sections: Sequence[Section], *, progress: bool = False
) -> str:
    """The page, the same text for the same parts. Empty sections are left out.

    Parameters
    ----------
    sources : sequence of str
        The names of what is reported.
    progress : bool
        Show a bar.

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
    environment.filters["document"] = lambda text: Markup(html.escape(text, quote=False))
    shown = [section for section in sections if section]

    with progress_bar(sum(len(section.pictures) for section in shown), "picture", shown=progress) as bar:

        def draw(picture: Picture) -> Markup:
            figure = picture.figure()
            bar.update()
            return Markup(svg(figure))  # matplotlib has escaped its texts

        style = Markup((resources.files("skipdecode.reporting") / "page.css").read_text(encoding="utf-8"))
        page = environment.get_template("page.html")
        return page.render(title=title, sources=sources, cards=cards, sections=shown, style=style, draw=draw)
