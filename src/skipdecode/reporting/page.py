"""A page as data, and the one HTML document that it becomes (Jinja2; every text is escaped by it).

Knows nothing about results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from skipdecode.errors import MissingExtraError
from skipdecode.reporting.plots import svg

__all__ = ["Details", "Output", "Picture", "Sample", "Section", "Table", "Tile", "render"]


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
    figure : Figure
    caption : str
        Under it.
    label : str
        What it shows, in words, for those who do not see it.
    numbers : Table, optional
        What was drawn.
    wide : bool
        Over the whole width.
    """

    figure: Any
    caption: str
    label: str
    numbers: Table | None = None
    wide: bool = False


@dataclass(frozen=True)
class Output:
    """One text of a sample: pieces, each with whether it is to be marked."""

    name: str
    pieces: Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class Sample:
    """A prompt and what came of it, side by side."""

    prompt: str
    outputs: Sequence[Output]


@dataclass(frozen=True)
class Details:
    """Preformatted text behind a line that opens it."""

    summary: str
    text: str


@dataclass(frozen=True)
class Section:
    """A part of the page with its heading; `more` are pictures behind a line that opens them."""

    heading: str
    intro: str = ""
    pictures: Sequence[Picture] = ()
    more: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    details: Sequence[Details] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.more or self.tables or self.samples or self.details)


@dataclass(frozen=True)
class Tile:
    """A figure that stands out, with what it is."""

    value: str
    text: str


@dataclass
class _Drawn:
    """Pictures of the page as SVG, each under an id of its own."""

    count: int = field(default=0)

    def __call__(self, picture: Picture) -> Any:
        from markupsafe import Markup

        self.count += 1
        # Made by `plots`, which escapes its texts.
        return Markup(svg(picture.figure, f"p{self.count}", picture.label))


def render(title: str, subtitle: str, tiles: Sequence[Tile], sections: Sequence[Section]) -> str:
    """The page, the same text for the same parts. Empty sections are left out.

    Raises
    ------
    MissingExtraError
        Jinja2 or matplotlib is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError("an HTML report", "report") from None
    environment = Environment(
        loader=PackageLoader("skipdecode.reporting", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (resources.files("skipdecode.reporting") / "page.css").read_text(encoding="utf-8")
    from markupsafe import Markup

    page = environment.get_template("page.html")
    return page.render(
        title=title,
        subtitle=subtitle,
        tiles=tiles,
        sections=[section for section in sections if section],
        style=Markup(style),
        draw=_Drawn(),
    )
