"""A page as data, and its HTML document (Jinja2, which escapes every text). Knows nothing about results."""

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
"""The pieces of a text, and for each whether it is marked."""
Sample = tuple[str, Sequence[tuple[str, Pieces]]]
"""A prompt and its outputs: the name and the pieces of each."""


@dataclass(frozen=True)
class Card:
    """A card on the first screen: a heading and answers, each with a figure, its meaning, and further lines."""

    heading: str
    answers: Sequence[tuple[str, str, Sequence[str]]]
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell of a row is its name. The first `pinned` columns (two on a phone) do not scroll."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    pinned: int = 1


@dataclass(frozen=True)
class Picture:
    """A figure over the whole width of the page: a function that makes it with matplotlib, and its caption."""

    figure: Callable[[], Any]
    caption: str


@dataclass(frozen=True)
class Section:
    """A section of the page; `details` are pairs of a summary and a preformatted text, closed at first."""

    heading: str
    intro: str = ""
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    details: Sequence[tuple[str, str]] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.tables or self.samples or self.details)


def table(caption: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], *, pinned: int = 1) -> Table:
    """Records as a table: `columns` has a pattern of `str.format` for each heading.

    A cell is a dash if a field is missing, None or of another type.
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
    """The HTML document, without the empty sections; the same text for the same arguments.

    Parameters
    ----------
    sources : sequence of str
        The names of the reported files.
    progress : bool
        Show a progress bar.

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
            return Markup(svg(figure))  # matplotlib escapes its texts

        style = Markup((resources.files("skipdecode.reporting") / "page.css").read_text(encoding="utf-8"))
        page = environment.get_template("page.html")
        return page.render(title=title, sources=sources, cards=cards, sections=shown, style=style, draw=draw)
