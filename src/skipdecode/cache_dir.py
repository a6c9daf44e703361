"""Where downloaded models and measurements are kept: one directory per user."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_dir"]


def cache_dir() -> Path:
    """The user's cache directory: `SKIPDECODE_CACHE` if set, else ~/.cache/skipdecode. Not created here."""
    chosen = os.environ.get("SKIPDECODE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "skipdecode"
