"""What `skipdecode eval` says on stderr while it works: a bar a stage, and the records that are left out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from skipdecode.evaluation.settings import Progress

__all__ = ["Bars", "note_left_out"]

_SHOWN = 5


class Bars(Progress):
    """See `Progress`."""

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Any]:
        """See `Progress.stage`."""
        # A log file gets a line now and then, a terminal a moving bar.
        pause = 0.2 if sys.stderr.isatty() else 10.0
        with tqdm(total=total, desc=name, unit="record", mininterval=pause, file=sys.stderr) as bar:
            yield bar

    def left_out(self, records: Sequence[tuple[int, str]]) -> None:
        """See `Progress.left_out`."""
        note_left_out(records)


def note_left_out(records: Sequence[tuple[int, str]]) -> None:
    """Say how many records are left out, and the line and reason of the first ones; nothing if there are none."""
    if records:
        lines = ", ".join(f"{line} ({reason})" for line, reason in records[:_SHOWN])
        more = " ..." if len(records) > _SHOWN else ""
        noun = "record" if len(records) == 1 else "records"
        print(f"skipdecode: {len(records)} {noun} left out; lines {lines}{more}", file=sys.stderr)
