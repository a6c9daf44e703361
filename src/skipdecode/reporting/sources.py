"""Result files: how they are found, recognised by their kind, and checked before anything is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import read_objects
from skipdecode.common.kinds import check_kind, read_json
from skipdecode.errors import DataError, ScheduleError
from skipdecode.evaluation.results import OUTPUTS_FILE, RUN_FILE, load_run
from skipdecode.schedule import Schedule

__all__ = ["PREPARED_FILE", "PREPARE_FILE", "SHOWN", "Source", "find_files", "of_kind", "read_source"]

PREPARE_FILE, PREPARED_FILE = "prepare.jsonl", "prepared.json"
"""The journal and the result of `skipdecode prepare`; the results of its stages are in directories beside them."""
_PREPARED = ("fit", "eval-*", "tuned-*")
_WHOLE = (RUN_FILE, "calibration.json", "log.jsonl", PREPARED_FILE)
_NUMBER = (int, float)
_SPEED = dict.fromkeys(("nominal_speedup", "mean_layers", "decode_tokens_per_s", "decode_speedup"), _NUMBER)
_NEEDED: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "bench": {
        "": {"bandwidth_gb_s": _NUMBER},
        "rows": _SPEED | {"engine": str, "batch": int, "roofline_share": _NUMBER},
    },
    "calibration": {
        "": {"schedule": dict},
        "verdicts": {"name": str} | dict.fromkeys(("speedup", "mean_layers", "measured"), _NUMBER),
        "rounds": {"base": _NUMBER, "losses": dict},
    },
    "prepared": {"": {"kept_by_minutes": dict}, "rows": {"name": str, "minutes": _NUMBER, "scores": dict}},
    "self-generated": {"": {"n": int}, "rows": {"name": str, "perplexity": _NUMBER}},
}
"""For each kind and list ("" is the document itself), the fields that sections need, with their types."""
SHOWN = (*_NEEDED, "evaluation", "schedule", "tuning")
"""Kinds of results that a report shows."""


@dataclass(frozen=True)
class Source:
    """A result file.

    Parameters
    ----------
    name : str
        The name of the file, or of its directory if all files of the kind have one name.
    kind : str
        The kind in the file (`skipdecode.common.kinds`), or ``schedule``.
    data : Any
        For evaluation a `Run`, for schedule a `Schedule`, for tuning a list of log lines, else the document.
    """

    name: str
    kind: str
    data: Any


def find_files(places: Sequence[str]) -> list[Path]:
    """The files, and the result files in the directories, among `places`; raises DataError if one does not exist."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise DataError(f"{place}: no such file or directory")
        found += _inside(place) if place.is_dir() else [place]
    return list(dict.fromkeys(found))


def _inside(directory: Path) -> list[Path]:
    if (directory / PREPARE_FILE).is_file():
        stages = [file for place in _PREPARED for made in sorted(directory.glob(place)) for file in _finished(made)]
        return [*directory.glob(PREPARED_FILE), *stages]
    for whole in _WHOLE:
        if (directory / whole).is_file():
            return [directory / whole]
    files = [p for p in directory.iterdir() if p.suffix in (".json", ".jsonl") and p.name != OUTPUTS_FILE]
    found = sorted([*files, *directory.glob(f"*/{RUN_FILE}")])
    if not found:
        raise DataError(f"{directory}: holds no result (*.json, *.jsonl, or directories with a {RUN_FILE})")
    return found


def _finished(directory: Path) -> list[Path]:
    try:
        return _inside(directory)
    except DataError:  # a stage that was interrupted
        return []


def read_source(path: Path) -> Source:
    """The source of a file.

    Raises
    ------
    DataError
        The file cannot be read, its kind is unknown, or a field that its kind needs is missing.
    """
    name = path.parent.name if path.name in _WHOLE else path.stem
    if path.suffix == ".jsonl":
        return Source(name, "tuning", _tuning(path))
    data = read_json(path)
    # A schedule file has no kind: it has the same content as the entry in a model's config.json.
    if isinstance(data, dict) and "kind" not in data and "drop_order" in data:
        return Source(name, "schedule", _schedule(path, data))
    check_kind(path, data)
    if data["kind"] == "evaluation":
        return Source(name, data["kind"], load_run(path))
    for key, needed in _NEEDED.get(data["kind"], {}).items():
        rows = data.get(key) if key else [data]
        _check_rows(path, rows, needed)
    if data["kind"] == "calibration":
        _schedule(path, data["schedule"])
    return Source(name, data["kind"], data)


def _tuning(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line, row in read_objects(path):
        if isinstance(row, DataError):
            raise DataError(f"{path}: line {line}: {row}")
        rows.append(row)
    check_kind(path, rows[0] if rows else None, "tuning")
    _check_rows(path, rows[1:], {"kind": str, "step": int})
    losses = [r for r in rows[1:] if r["kind"] in ("train", "dev") and isinstance(r.get("cross_entropy"), _NUMBER)]
    if not losses:
        raise DataError(f"{path}: no line has a cross_entropy")
    return losses


def _schedule(path: Path, data: Mapping[str, Any]) -> Schedule:
    try:
        return Schedule.from_dict(data)
    except ScheduleError as e:
        raise DataError(f"{path}: {e}") from None


def _check_rows(path: Path, rows: Any, needed: Mapping[str, Any]) -> None:
    if not isinstance(rows, list):
        raise DataError(f"{path}: a list of rows is missing")
    for number, row in enumerate(rows, 1):
        for key, kind in needed.items():
            value = row.get(key) if isinstance(row, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                raise DataError(f"{path}: row {number} lacks {key!r}, or its type is wrong")


def of_kind(sources: Iterable[Source], kind: str) -> list[Source]:
    """The sources of a kind, in order."""
    return [source for source in sources if source.kind == kind]
