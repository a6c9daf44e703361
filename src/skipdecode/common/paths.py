"""Where this package keeps files of the user's: one cache directory. Pure Python, creates nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The cache directory: ``SKIPDECODE_CACHE``, else ``skipdecode`` in the platform's cache directory.

    The platform's is ``LOCALAPPDATA`` on Windows and elsewhere ``XDG_CACHE_HOME``, by default ``~/.cache``.
    """
    if own := os.environ.get("SKIPDECODE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "skipdecode"
