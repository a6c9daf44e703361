"""What a result file says of itself: its `kind`, and the `format` of that kind. Readers go by these two alone.

A JSON document begins with both; of JSON lines, the first line is an object of the two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode.errors import DataError

__all__ = ["FORMATS", "check_kind", "heading", "read_json", "read_result"]

FORMATS: Mapping[str, int] = {
    "bench": 1,
    "benchmark": 1,
    "calibration": 1,
    "evaluation": 1,
    "prepared": 1,
    "quality-table": 1,
    "self-generated": 1,
    "simulation": 1,
    "tuning": 1,
}
"""Every kind, with the format that this version writes and reads; "benchmark" is for scripts outside the package."""


def heading(kind: str, benchmark: str | None = None) -> dict[str, Any]:
    """The entries that a result of this kind begins with; of kind benchmark, with its name."""
    return {"kind": kind, "format": FORMATS[kind]} | ({} if benchmark is None else {"benchmark": benchmark})


def check_kind(path: Path, found: Any, *kinds: str) -> None:
    """Refuse, with a DataError that names the file, what is not of one of these kinds (default: any) and its format."""
    wanted = kinds or tuple(FORMATS)
    kind = found.get("kind") if isinstance(found, Mapping) else None
    if kind not in wanted:
        said = "does not say its kind" if kind is None else f"is of kind {kind!r}"
        entry = f'"{wanted[0]}"' if len(wanted) == 1 else "one of these"
        raise DataError(
            f"{path} {said}; accepted: {', '.join(wanted)} (a file of an older version is read once it begins with "
            f'"kind": {entry}, "format": 1)'
        )
    if found.get("format") != FORMATS[kind]:
        raise DataError(f"{path}: this version reads format {FORMATS[kind]} of {kind}, not {found.get('format')!r}")


def read_result(path: Path, *kinds: str) -> dict[str, Any]:
    """A JSON result of one of these kinds (default: any); raises DataError, one line that names the file."""
    found: dict[str, Any] = read_json(path)
    check_kind(path, found, *kinds)
    return found


def read_json(path: Path) -> Any:
    """What a JSON file holds; raises DataError, one line that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: not JSON: {e}") from None
