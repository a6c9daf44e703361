"""Result files: found in what the user named, told apart by what they hold, checked before anything is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import read_objects
from skipdecode.errors import DataError, ScheduleError
from skipdecode.evaluation.results import OUTPUTS_FILE, RUN_FILE, load_run
from skipdecode.schedule import Schedule

__all__ = ["Source", "find_files", "of_kind", "read_source"]

_KINDS = (
    "runs of `skipdecode eval`, quality tables, results of `skipdecode bench`, benchmarks/decode_speed.py and "
    "benchmarks/serve_load.py, calibration.json and schedules, logs of `skipdecode tune`, "
    "and JSON with an environment record"
)
_NUMBER = (int, float)
_BENCH = {"engine": str, "batch": int, "nominal_speedup": _NUMBER, "mean_layers": _NUMBER,
          "decode_tokens_per_s": _NUMBER, "decode_speedup": _NUMBER, "roofline_share": _NUMBER}  # fmt: skip
_DECODE = {"nominal_speedup": _NUMBER, "mean_layers": _NUMBER, "decode_speedup": _NUMBER,
           "decode_tokens_per_s": _NUMBER, "predicted_speedup": _NUMBER}  # fmt: skip
_QUALITY = {"method": str, "retained": dict, "intervals": dict, "n": int}
_VERDICT = {"name": str, "speedup": _NUMBER, "mean_layers": _NUMBER, "predicted": _NUMBER, "measured": _NUMBER}
_TUNING = {"kind": str, "step": int}
_LOAD = {"speedup": _NUMBER, "streams": int, "errors": list, "streams_unlike_offline": int}
_LOADED = {"tokens_per_s": _NUMBER, "streams": int, "first_token_s": dict, "between_chunks_s": dict}


@dataclass(frozen=True)
class Source:
    """A file that was understood.

    Parameters
    ----------
    name : str
        For readers; the file's name, or its directory's where all files are called the same.
    kind : str
        ``eval``, ``quality``, ``bench``, ``decode``, ``load``, ``calibration``, ``schedule``,
        ``tuning``, or ``other`` for a result of this package that is none of these.
    data : Any
        A `Run` of kind eval, a `Schedule` of kind schedule, a list of rows of kind tuning, else the document.
    """

    name: str
    kind: str
    data: Any


def find_files(places: Sequence[str]) -> list[Path]:
    """Files that were named, and of directories the results in them; raises DataError for a place that is not there."""
    found: list[Path] = []
    for place in map(Path, places):
        if not place.exists():
            raise DataError(f"{place}: no such file or directory")
        found += _inside(place) if place.is_dir() else [place]
    return list(dict.fromkeys(found))


def _inside(directory: Path) -> list[Path]:
    for whole in (RUN_FILE, "calibration.json", "log.jsonl"):
        if (directory / whole).is_file():
            return [directory / whole]
    files = [p for p in directory.iterdir() if p.suffix in (".json", ".jsonl") and p.name != OUTPUTS_FILE]
    found = sorted([*files, *directory.glob(f"*/{RUN_FILE}")])
    if not found:
        raise DataError(f"{directory}: holds no result (*.json, *.jsonl, or directories with a {RUN_FILE})")
    return found


def read_source(path: Path) -> Source:
    """One file.

    Raises
    ------
    DataError
        It cannot be read, is no result of a known kind, or lacks what its kind needs; one line that names it.
    """
    name = path.parent.name if path.name in (RUN_FILE, "log.jsonl", "calibration.json") else path.stem
    if path.suffix == ".jsonl":
        return Source(name, "tuning", _tuning(path))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: not JSON: {e}") from None
    for kind, (fits, reader) in _READERS.items():
        if isinstance(data, dict) and fits(data):
            return Source(name, kind, reader(path, data))
    raise DataError(f"{path}: not a result that a report knows; accepted are {_KINDS}")


def _tuning(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line, row in read_objects(path):
        if isinstance(row, DataError):
            raise DataError(f"{path}: line {line}: {row}")
        rows.append(row)
    _check_rows(path, rows, _TUNING)
    losses = [r for r in rows if r["kind"] in ("train", "dev") and isinstance(r.get("cross_entropy"), _NUMBER)]
    if not losses:
        raise DataError(f"{path}: not a log of `skipdecode tune`: no row has a cross_entropy")
    return losses


def _schedule(path: Path, data: Mapping[str, Any]) -> Schedule:
    try:
        return Schedule.from_dict(data)
    except ScheduleError as e:
        raise DataError(f"{path}: {e}") from None


def _calibration(path: Path, data: Mapping[str, Any]) -> Mapping[str, Any]:
    _schedule(path, data["schedule"])
    _check_rows(path, data["verdicts"], _VERDICT)
    _check_rows(path, data.get("rounds", []), {"base": _NUMBER, "losses": dict})
    return data


def _load(path: Path, data: Mapping[str, Any]) -> Mapping[str, Any]:
    _check_rows(path, [data], _LOAD)
    _check_rows(path, list(data["schedules"].values()), _LOADED)
    return data


def _rows_of(needed: Mapping[str, Any], key: str = "rows") -> Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]:
    def check(path: Path, data: Mapping[str, Any]) -> Mapping[str, Any]:
        _check_rows(path, data[key], needed)
        return data

    return check


def _check_rows(path: Path, rows: Any, needed: Mapping[str, Any]) -> None:
    if not isinstance(rows, list):
        raise DataError(f"{path}: a list of rows is missing")
    for number, row in enumerate(rows, 1):
        for key, kind in needed.items():
            value = row.get(key) if isinstance(row, dict) else None
            if not isinstance(value, kind) or isinstance(value, bool):
                raise DataError(f"{path}: row {number} lacks {key!r}, or it is of the wrong type")


def _has(*names: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda data: all(name in data for name in names)


_Reader = tuple[Callable[[Mapping[str, Any]], bool], Callable[[Path, Mapping[str, Any]], Any]]
_READERS: dict[str, _Reader] = {
    "eval": (lambda d: d.get("kind") == "eval", lambda path, _: load_run(path)),
    "quality": (lambda d: d.get("kind") == "quality", _rows_of(_QUALITY, "runs")),
    "bench": (_has("rows", "bandwidth_gb_s"), _rows_of(_BENCH)),
    "decode": (_has("rows", "cost_model"), _rows_of(_DECODE)),
    "load": (lambda d: isinstance(d.get("schedules"), dict) and "streams_unlike_offline" in d, _load),
    "calibration": (_has("schedule", "verdicts"), _calibration),
    "schedule": (_has("drop_order", "budgets"), _schedule),
    # Whatever says in which environment it was measured, as every result of this package does.
    "other": (
        lambda d: isinstance(d.get("environment"), dict) and "packages" in d["environment"],
        lambda _, data: data,
    ),
}


def of_kind(sources: Iterable[Source], kind: str) -> list[Source]:
    """Those of one kind, in order."""
    return [source for source in sources if source.kind == kind]
