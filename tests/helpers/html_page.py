"""Reads an HTML page strictly: tags must close; text and links are kept."""

from __future__ import annotations

from html.parser import HTMLParser

_VOID = ("meta", "br", "link", "img", "input")


class Page(HTMLParser):
    """What was found: text without styles, links that leave the page, all attributes called alt or aria-label."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.labels: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v and not v.startswith("#")]
        self.labels += [v or "" for k, v in attrs if k in ("aria-label", "alt")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def read_page(html: str) -> Page:
    """The page, whose tags all close."""
    page = Page()
    page.feed(html)
    assert page.open == []
    return page
