"""What a run has finished, on disk, so that a run that was killed goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skipdecode.common.journal import Journal, is_begun
from skipdecode.common.jsonl import json_line
from skipdecode.evaluation.methods.base import Generation

__all__ = ["Unfinished"]

_UNFINISHED = "unfinished.jsonl"
_SAVED = "saved"


class Unfinished:
    """The journal of a run that is not saved yet: its batches with every method's generation, the methods saved.

    Under other settings the file starts anew: what it holds belongs to another run.

    Parameters
    ----------
    directory : Path
        The run's directory.
    about : mapping
        JSON-ready; all that the outputs depend on.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        self._batches: dict[int, list[Generation]] = {}
        self._saved: dict[str, Any] = {}
        self._journal = Journal(
            directory / _UNFINISHED, "evaluation", _digest(about), parse=json.loads, take=self._take,
            pieces="finished batches", remedy="give --overwrite", restart=not self.goes_on(directory, about),
        )  # fmt: skip

    @staticmethod
    def is_in(directory: Path) -> bool:
        """Whether some run was begun in the directory and not finished."""
        return (directory / _UNFINISHED).exists()

    @staticmethod
    def goes_on(directory: Path, about: Mapping[str, Any]) -> bool:
        """Whether this very run was begun in the directory and not finished."""
        return is_begun(directory / _UNFINISHED, "evaluation", _digest(about))

    def get(self, batch: int) -> list[Generation] | None:
        """The generations of a finished batch, by its number."""
        return self._batches.get(batch)

    def put(self, batch: int, generations: list[Generation]) -> None:
        """Keep a batch; raises OutputError if it cannot be written."""
        self._journal.append(json_line([batch, [asdict(g) for g in generations]]))

    def saved(self, place: str) -> Any:
        """What `put_saved` was told of the results in a directory; None if they are not this run's."""
        return self._saved.get(place)

    def put_saved(self, place: str, scored_with: Any) -> None:
        """Keep that a method's results are saved in a directory, and with what they were scored (JSON-ready)."""
        self._journal.append(json_line([_SAVED, place, scored_with]))

    def remove(self) -> None:
        """The run is saved: nothing needs to be kept."""
        self._journal.remove()

    def close(self) -> None:
        """Keep what is there; may be called twice."""
        self._journal.close()

    def _take(self, piece: list[Any]) -> None:
        first, *rest = piece
        if first == _SAVED:
            place, self._saved[place] = rest
        else:
            self._batches[first] = [Generation(**g) for g in rest[0]]


def _digest(about: Mapping[str, Any]) -> dict[str, str]:
    """All of it would be as long as the prompts."""
    return {"sha256": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}
