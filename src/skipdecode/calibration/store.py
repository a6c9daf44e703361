"""Measured losses kept line by line, so that a calibration that was killed measures nothing twice. Pure Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skipdecode.errors import OutputError, UsageError

__all__ = ["MeasurementStore"]

_FORMAT = 1


class MeasurementStore:
    """A JSONL file: a heading that says what was measured, then a line for each batch under each schedule.

    Parameters
    ----------
    path : Path
        Made if it does not exist.
    identity : mapping
        JSON-ready; model, weights and records. A file of other ones is refused.

    Raises
    ------
    UsageError
        The file's measurements are of something else.
    OutputError
        It cannot be read or written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self._found: dict[str, list[float]] = {}
        heading = {"format": _FORMAT} | dict(identity)
        try:
            # What a kill cut off in the middle of a line goes.
            lines = [] if not path.exists() else path.read_bytes().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            if whole:
                self._read(whole, heading)
            self._file = path.open("ab")
            self._file.truncate(sum(map(len, whole)))
        except OSError as e:
            raise OutputError(f"cannot keep measurements in {path}: {e.strerror or e}") from None
        if not whole:
            self._append(heading)

    def _read(self, lines: Sequence[bytes], heading: Mapping[str, Any]) -> None:
        try:
            first, *rest = (json.loads(line) for line in lines)
            changed = sorted(k for k in {*first, *heading} if first.get(k) != heading.get(k))
            self._found = {row["key"]: row["sums"] for row in rest}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UsageError(f"{self._path} does not hold measurements: give another --out") from None
        if changed:
            raise UsageError(f"{self._path} was measured with another {changed[0]}: give another --out")

    def get(self, key: str) -> list[float] | None:
        """The losses measured under a key, if there are any."""
        return self._found.get(key)

    def put(self, key: str, sums: list[float]) -> None:
        """Keep losses; on the disk at once."""
        self._found[key] = sums
        self._append({"key": key, "sums": sums})

    def _append(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
        except OSError as e:
            raise OutputError(f"cannot keep measurements in {self._path}: {e.strerror or e}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()
