"""Finished batches of a run on disk, so that a run that was killed goes on where it stopped.

One header line with the run's fingerprint, then one line a batch. A line that was cut off is dropped. Under another
fingerprint the file starts anew: what it holds belongs to another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skipdecode.errors import OutputError
from skipdecode.methods.base import Generation

__all__ = ["Kept"]

_FILE = "unfinished.jsonl"


class Kept:
    """Batches that are done, by number; each holds the generation of every method that took its turn.

    Parameters
    ----------
    directory : Path
        The run's directory.
    about : mapping
        JSON-ready; all that the outputs depend on.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        self._path = directory / _FILE
        header = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._batches: dict[int, list[Generation]] = {}
        whole = self._read(header)
        self._append(whole or json.dumps(header) + "\n", "w")

    def __len__(self) -> int:
        return len(self._batches)

    def get(self, batch: int) -> list[Generation] | None:
        """The generations of a finished batch."""
        return self._batches.get(batch)

    def put(self, batch: int, generations: list[Generation]) -> None:
        """Keep a batch; raises OutputError if it cannot be written."""
        self._batches[batch] = generations
        self._append(json.dumps([batch, [asdict(g) for g in generations]]) + "\n", "a")

    def remove(self) -> None:
        """The run is saved: nothing needs to be kept."""
        self._path.unlink(missing_ok=True)

    def _read(self, header: str) -> str:
        """Take over the lines of an earlier run; returns them if they are of this run."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            return ""
        if not lines or lines[0] != json.dumps(header) + "\n":
            return ""
        kept = lines[:1]
        for line in lines[1:]:
            if not line.endswith("\n"):
                break
            batch, generations = json.loads(line)
            self._batches[batch] = [Generation(**g) for g in generations]
            kept.append(line)
        return "".join(kept)

    def _append(self, text: str, mode: str) -> None:
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as e:
            raise OutputError(f"cannot write {self._path}: {e.strerror or e}") from None
