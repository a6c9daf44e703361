"""What a user is told while work goes on, on standard error: lines, and bars that lines leave whole."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

__all__ = ["note", "progress_bar"]


def note(line: str) -> None:
    """One line, above a progress bar that may be there."""
    tqdm.write(f"skipdecode: {line}", file=sys.stderr)


def progress_bar(total: int | None, unit: str, *, name: str | None = None, done: int = 0, shown: bool = True) -> Any:
    """tqdm's bar over `total` units, `done` of which were there before; one that is not `shown` says nothing."""
    # A terminal gets a moving bar, a log file a line now and then.
    pause = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(total=total, initial=done, desc=name, unit=unit, mininterval=pause, file=sys.stderr, disable=not shown)
