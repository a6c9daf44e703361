"""Where the notes beside the points of a chart go: each to the first of some places where it covers nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["spread_notes"]

_NEAR, _FAR = 5, 17  # points from the mark to the note
_PLACES = tuple(
    (right * _NEAR, up * distance, "left" if right > 0 else "right", "bottom" if up > 0 else "top")
    for distance in (_NEAR, _FAR)
    for right, up in ((1, 1), (1, -1), (-1, 1), (-1, -1))
)
_MARK = 3  # half of a mark's width, in points


def spread_notes(figure: Any, axes: Any, marks: Iterable[tuple[float, float]]) -> None:
    """Move the annotations of drawn axes off the marks and off each other; where there is no room, up and right.

    Parameters
    ----------
    figure : Figure
        Complete: its layout is computed here.
    axes : Axes
        All its texts are annotations.
    marks : iterable of (x, y)
        In data coordinates.
    """
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    half = _MARK * figure.dpi / 72
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in map(axes.transData.transform, marks)]
    for note in sorted(axes.texts, key=lambda note: note.xy):
        for place in (*_PLACES, _PLACES[0]):
            _put(note, place)
            if not any(note.get_window_extent().overlaps(box) for box in taken):
                break
        taken.append(note.get_window_extent())


def _put(note: Any, place: tuple[int, int, str, str]) -> None:
    right, up, horizontal, vertical = place
    note.set_position((right, up))
    note.set(horizontalalignment=horizontal, verticalalignment=vertical)
