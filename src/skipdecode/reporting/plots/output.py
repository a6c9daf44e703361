"""A figure as a PNG, or as SVG text whose colours a page can set."""

from __future__ import annotations

import html
import io
import re
from typing import Any

from skipdecode.errors import MissingExtraError

__all__ = ["COLORS", "GRID", "INK", "LEFT_OUT", "check_matplotlib", "new_figure", "png", "svg", "tip"]

# Okabe and Ito's colours, made a little darker: told apart by colour-blind readers, and on white paper.
COLORS = ("#0b6fae", "#c8501e", "#0a8f6a", "#a8508a", "#a37a00", "#3d97c4", "#6b5bb5", "#5a6673")
INK, GRID, LEFT_OUT = "#1d2733", "#d5dbe1", "#e6e8e4"
_DPI = 150
_TIP = "tip:"
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "skipdecode",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
_VARIABLES = {color: f"--c{i}" for i, color in enumerate(COLORS)} | {INK: "--ink", GRID: "--grid", LEFT_OUT: "--idle"}


def check_matplotlib() -> None:
    """Raise MissingExtraError, before the work whose result is to be drawn, where there is no matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingExtraError("a picture", "plot") from None


def new_figure(width: float = 4.7, height: float = 3.3) -> Any:
    """An empty figure of this many inches; raises MissingExtraError without matplotlib."""
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        # Not through pyplot: no window system, no global state.
        return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def styled() -> Any:
    """The context in which axes are made and drawn on."""
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def tip(artist: Any, text: str) -> None:
    """Text that a reader of the SVG sees when pointing at the artist."""
    artist.set_gid(_TIP + text)


def png(figure: Any) -> bytes:
    """The figure as a PNG, on white."""
    buffer = io.BytesIO()
    with styled():
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def svg(figure: Any, name: str, label: str) -> str:
    """The figure as an SVG element for an HTML page, the same text for the same figure.

    Parameters
    ----------
    name : str
        Letters and digits; goes before every id, so that several pictures live in one page.
    label : str
        What the picture shows, for those who do not see it.

    Returns
    -------
    str
        Transparent; colours are CSS variables (``--ink``, ``--grid``, ``--idle``, ``--c0`` to ``--c7``), and so is
        that of text without one (``--ink``): the page has them, and sets the size from ``--width`` (in points). Text
        of class ``middle`` or ``end`` is 10 pixels high and anchored there.
    """
    buffer = io.StringIO()
    with styled():
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    # Inside HTML the document's own prologue would be an error, and nobody reads the metadata.
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    text = _smaller(text)
    # matplotlib has escaped the text as it does every attribute.
    text = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", text)
    short = {
        long: f"{name}-{i}" for i, long in enumerate(dict.fromkeys(re.findall(r'(?:url\(|href=")#([^)"]+)', text)))
    }
    text = re.sub(r' id="([^"]+)"', lambda found: f' id="{short[found[1]]}"' if found[1] in short else "", text)
    text = re.sub(r'(url\(|href=")#([^)"]+)', lambda found: f"{found[1]}#{short[found[2]]}", text)
    box = next(re.finditer(r'viewBox="([^"]+)"', text))[1]
    head = f'<svg viewBox="{box}" style="--width: {box.split()[2]}" role="img" aria-label="{html.escape(label)}">'
    return head + _unwrapped(text[text.index(">") + 1 :])


# What the page's style says once for all pictures, or what the element that is used says already.
_SAID = (
    r"font-family: [^;]*; ",
    r' transform="rotate\(-0 [^"]*"',
    r"(?<=text-anchor: middle); fill: var\(--ink\)|(?<=text-anchor: end); fill: var\(--ink\)",
    r' style="fill: var\(--ink\); stroke: var\(--ink\); stroke-width: 0.8"',
    r"; stroke-linecap: square|; stroke-linejoin: miter|; stroke-dashoffset: 0",
    r'<defs><style type="text/css">[^<]*</style></defs>',
    r'<path d="[^"]*" style="fill: none"/>',  # Draws nothing.
    r'<path(?: d="M [-\d.]+ [-\d.]+")?(?: clip-path="[^"]*")? style="[^"]*"/>',  # Nor does one point, or none.
)


def _smaller(text: str) -> str:
    """The same picture in fewer letters: tenths of a point, no white space between elements or in styles."""
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda found: _rounded(found[0]), text)
    text = re.sub("|".join(_SAID), "", re.sub(r">\s+<", "><", text))
    text = re.sub(r"<g[^<>]*></g>", "", text)
    text = re.sub(r' clip-path="[^"]*"(?= style="fill: none; stroke: var\(--grid\))', "", text)
    text = re.sub(r' style="[^"]*"', lambda found: re.sub("([:;]) ", r"\1", found[0]), text)
    return re.sub(r'style="font-size:10px;text-anchor:(middle|end)"', r'class="\1"', text)


def _unwrapped(text: str) -> str:
    """Without groups that say nothing: neither an attribute nor a title."""
    kept: list[bool] = []

    def one(found: re.Match[str]) -> str:
        if found[0] != "</g>":
            kept.append(found[0] != "<g>" or text.startswith("<title>", found.end()))
        return found[0] * (kept.pop() if found[0] == "</g>" else kept[-1])

    return re.sub(r"</?g\b[^>]*>", one, text)


def _rounded(attribute: str) -> str:
    tenths = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), attribute)
    joined = re.sub(r"\s*\n", "", tenths)
    # Behind a point another one is a line to it; behind a curve's it would be the curve's.
    return joined if "C" in joined or "Q" in joined else re.sub(r"(?<=\d)L ", " ", joined)
