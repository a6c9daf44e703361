"""A run as data: ``run.json`` (what was run, scores, speed, buckets, samples) and ``outputs.jsonl`` (a line a record).

Tables, comparisons and reports are made from these two files alone. Until a run is saved, ``unfinished.jsonl`` keeps
what is done, so that a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipdecode.common.files import write_whole
from skipdecode.common.journal import KeptValues, is_begun
from skipdecode.common.jsonl import read_objects
from skipdecode.errors import DataError, OutputError

__all__ = [
    "FORMAT",
    "OUTPUTS_FILE",
    "RUN_FILE",
    "Run",
    "check_directory",
    "is_unfinished",
    "keep_unfinished",
    "load_run",
    "save_run",
]

FORMAT = 1
RUN_FILE = "run.json"
OUTPUTS_FILE = "outputs.jsonl"
_UNFINISHED = "unfinished.jsonl"
_NEEDED = ("format", "name", "config", "metrics", "buckets", "samples", "outputs", "environment", "n")


@dataclass(frozen=True)
class Run:
    """A finished run, read back.

    Parameters
    ----------
    path : Path
        Its ``run.json``.
    data : mapping
        The document.
    """

    path: Path
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Label in tables."""
        return str(self.data["name"])

    @property
    def measured_speedup(self) -> float | None:
        """Wall-clock speed-up over full depth in the same run; None if it was not measured."""
        value = self.data.get("measured_speedup")
        return None if value is None else float(value)

    def score(self, metric: str) -> float | None:
        """A score, or None if the run does not have it."""
        entry = self.data["metrics"].get(metric)
        return None if entry is None else float(entry["score"])

    @cached_property
    def outputs(self) -> list[dict[str, Any]]:
        """Rows of the outputs file, in the order of the data; raises DataError if it is missing or broken."""
        path = self.path.parent / str(self.data["outputs"])
        rows = []
        if not path.is_file():
            raise DataError(f"{self.path} names the outputs {path}, which cannot be read: there is no such file")
        for line, row in read_objects(path):
            if isinstance(row, DataError):
                raise DataError(f"{path} is broken: {row}; run the evaluation again", line)
            rows.append(row)
        if len(rows) != self.data["n"]:
            raise DataError(f"{path} has {len(rows)} of {self.data['n']} records: run the evaluation again")
        return rows

    def table(self, metric: str) -> NDArray[np.float64]:
        """Statistics of each record, shape (records, k)."""
        try:
            return np.asarray([row["statistics"][metric] for row in self.outputs], dtype=np.float64)
        except KeyError:
            raise DataError(
                f"{self.path} has no statistics of {metric}: run it again with --metrics {metric}"
            ) from None


def load_run(path: str | Path) -> Run:
    """A run from its ``run.json``, or from the directory that holds it.

    Raises
    ------
    DataError
        The file cannot be read, or is not such a document.
    """
    file = Path(path)
    file = file / RUN_FILE if file.is_dir() else file
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"cannot read the run {file}: {e.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise DataError(f"{file} is not a run: it must be JSON that `skipdecode eval` wrote ({e})") from None
    missing = [name for name in _NEEDED if name not in data] if isinstance(data, dict) else ["format"]
    if missing or data["format"] != FORMAT:
        what = (
            f"it lacks {missing[0]!r}" if missing else f"its format is {data['format']!r}, this version reads {FORMAT}"
        )
        raise DataError(f"{file} is not a run of `skipdecode eval`: {what}")
    return Run(file, data)


def check_directory(directory: Path, *, overwrite: bool) -> None:
    """Refuse, before any heavy work, a directory that cannot take a run or holds one already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OutputError(f"cannot make the directory {directory}: {e.strerror}") from None
    if (directory / RUN_FILE).exists() and not overwrite:
        raise OutputError(f"{directory} holds a run already: give --overwrite to replace it, or another --out")
    if not os.access(directory, os.W_OK):
        raise OutputError(f"cannot write into {directory}: permission denied")


def save_run(directory: Path, data: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]]) -> Run:
    """Write the outputs, then the document, each in one step, so that a run that is there is whole."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in outputs)
    write_whole(directory / OUTPUTS_FILE, lines)
    write_whole(directory / RUN_FILE, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return Run(directory / RUN_FILE, data)


def is_unfinished(directory: Path, about: Mapping[str, Any] | None = None) -> bool:
    """Whether a run was begun in the directory and not finished: some run, or the one that `about` describes."""
    path = directory / _UNFINISHED
    return path.exists() if about is None else is_begun(path, _digest(about))


def keep_unfinished(directory: Path, about: Mapping[str, Any]) -> KeptValues:
    """What is kept of a run until it is saved.

    `about` is JSON-ready: all that the outputs depend on. What another run left starts anew.
    """
    restart = not is_unfinished(directory, about)
    path, remedy = directory / _UNFINISHED, "give --overwrite"
    return KeptValues(path, _digest(about), pieces="finished batches", remedy=remedy, restart=restart)


def _digest(about: Mapping[str, Any]) -> dict[str, str]:
    """All of it would be as long as the prompts."""
    return {"sha256": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()}
