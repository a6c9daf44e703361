"""Every layer for every token."""

from __future__ import annotations

from skipdecode.evaluation.methods.base import Timed

__all__ = ["Full"]


class Full(Timed):
    """The model as it is: the yardstick of all other methods."""

    name = "full"
    lossless = True
    full_depth = True
