"""A run's log: JSON lines as it goes; names of what a run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from skipdecode.common.files import write_whole, writing
from skipdecode.common.kinds import heading

CHECKPOINTS, LOG_FILE = "checkpoints", "log.jsonl"


class RunLog:
    """Writes a line that says what the file is, then rows of kind "train" and "dev".

    `keep_steps`: rows of later steps are dropped: those that a killed run wrote after its last checkpoint, and that
    come again.
    """

    def __init__(self, directory: Path, *, keep_steps: int) -> None:
        path = directory / LOG_FILE
        rows = [row for row in read_log(path) if row["step"] <= keep_steps] if keep_steps else []
        write_whole(path, "".join(map(_line, [heading("tuning"), *rows])))
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """One row; it is on its way to the disk when this returns."""
        with writing(self._path):
            self._file.write(_line({"kind": kind, "step": step, **values}).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The rows of a log; none if there is no file. A last line that a kill cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # A log that an older version began has no such first line.
    return [row for row in map(json.loads, lines[:-1]) if "step" in row]


def dev_losses(path: Path) -> list[tuple[float, float]]:
    """Minutes of tuning, and the loss on the dev records at that time, from a log."""
    rows = read_log(path)
    minutes = {row["step"]: row["minutes"] for row in rows if row["kind"] == "train"}
    return [(minutes.get(row["step"], 0.0), row["cross_entropy"]) for row in rows if row["kind"] == "dev"]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"
