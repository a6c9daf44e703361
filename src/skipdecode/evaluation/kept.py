"""What a run has finished, on disk, so that a run that was killed goes on where it stopped.

One header line with the run's fingerprint, then one line a batch, then one line for each method whose results are
saved. A line that was cut off is dropped. Under another fingerprint the file starts anew: what it holds belongs to
another run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skipdecode.common.files import write_whole
from skipdecode.errors import OutputError
from skipdecode.evaluation.methods.base import Generation

__all__ = ["Kept", "unfinished"]

_FILE = "unfinished.jsonl"
_SAVED = "saved"


def unfinished(directory: Path) -> bool:
    """Whether some run was begun in the directory and not finished."""
    return (directory / _FILE).exists()


class Kept:
    """Batches that are done, by number, each with the generation of every method that took its turn; methods saved.

    Parameters
    ----------
    directory : Path
        The run's directory.
    about : mapping
        JSON-ready; all that the outputs depend on.

    Attributes
    ----------
    goes_on : bool
        This very run was begun before and not finished.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        self._path = directory / _FILE
        self._header = json.dumps(hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()) + "\n"
        self._batches: dict[int, list[Generation]] = {}
        self._saved: dict[str, Any] = {}
        self._lines = self._read()
        self.goes_on = bool(self._lines)

    def __len__(self) -> int:
        return len(self._batches)

    def begin(self) -> None:
        """Take the place of what another run left; raises OutputError if it cannot be written."""
        write_whole(self._path, self._lines or self._header)

    def get(self, batch: int) -> list[Generation] | None:
        """The generations of a finished batch."""
        return self._batches.get(batch)

    def put(self, batch: int, generations: list[Generation]) -> None:
        """Keep a batch; raises OutputError if it cannot be written."""
        self._batches[batch] = generations
        self._append([batch, [asdict(g) for g in generations]])

    def saved(self, place: str) -> Any:
        """What `put_saved` was told of the results in a directory; None if they are not this run's."""
        return self._saved.get(place)

    def put_saved(self, place: str, scored_with: Any) -> None:
        """Keep that a method's results are saved in a directory, and with what they were scored (JSON-ready)."""
        self._append([_SAVED, place, scored_with])

    def remove(self) -> None:
        """The run is saved: nothing needs to be kept."""
        self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        """Take over the lines of an earlier run; returns them if they are of this run."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (OSError, UnicodeDecodeError):
            return ""
        if not lines or lines[0] != self._header:
            return ""
        kept = lines[:1]
        for line in lines[1:]:
            if not line.endswith("\n"):
                break
            first, *rest = json.loads(line)
            if first == _SAVED:
                place, scored_with = rest
                self._saved[place] = scored_with
            else:
                self._batches[first] = [Generation(**g) for g in rest[0]]
            kept.append(line)
        return "".join(kept)

    def _append(self, entry: list[Any]) -> None:
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as e:
            raise OutputError(f"cannot write {self._path}: {e.strerror or e}") from None
