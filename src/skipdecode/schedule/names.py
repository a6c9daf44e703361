"""Names of schedules and methods, which end in their speed-up: calibrated-2x. Pure Python."""

from __future__ import annotations

import re

__all__ = ["curve_name"]

_SPEED_ENDING = re.compile(r"[-_@ ]\d+(\.\d+)?x$")


def curve_name(name: str) -> str:
    """A run's or method's name without an ending such as "-2x": runs that differ in it only are one curve."""
    return _SPEED_ENDING.sub("", name)
