"""The playground page: files that are read once and kept in memory; a request's path is only looked up among them."""

from __future__ import annotations

from importlib.resources import files

__all__ = ["page_files"]

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def page_files() -> dict[str, tuple[bytes, str]]:
    """Content and media type by path; index.html is "/"."""
    found = {}
    for file in files("skipdecode.serving").joinpath("static").iterdir():
        kind = _KINDS.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = file.read_bytes(), kind
    return found
