"""The `kind` and `format` of a result file, by which readers recognise it.

A JSON document begins with both; in JSON lines, the first line is an object with both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skipdecode.errors import DataError

KINDS = (
    "bench", "benchmark", "calibration", "evaluation", "prepared", "quality-table", "self-generated", "tuning",
)  # fmt: skip
"""All kinds; "benchmark" and "quality-table" are for scripts outside the package."""
_FORMAT = 1
PREPARED_FILE = "prepared.json"


def heading(kind: str, benchmark: str | None = None) -> dict[str, Any]:
    """The first entries of a result of this kind; for the kind benchmark, also its name."""
    return {"kind": kind, "format": _FORMAT} | ({} if benchmark is None else {"benchmark": benchmark})


def check_kind(path: Path, found: Any, *kinds: str) -> None:
    """Refuse, with a DataError, a document that has none of these kinds (default: any kind) or another format."""
    wanted = kinds or KINDS
    kind = found.get("kind") if isinstance(found, Mapping) else None
    if kind not in wanted:
        said = "has no kind" if kind is None else f"is of kind {kind!r}"
        raise DataError(f'{path} {said}: accepted are files with "kind" {", ".join(wanted)} and "format": {_FORMAT}')
    if found.get("format") != _FORMAT:
        raise DataError(f"{path}: this version reads format {_FORMAT}, not {found.get('format')!r}")


def read_result(path: Path, *kinds: str) -> dict[str, Any]:
    """A JSON result of one of these kinds (default: any kind); raises DataError with the path."""
    found: dict[str, Any] = read_json(path)
    check_kind(path, found, *kinds)
    return found


def read_json(path: Path) -> Any:
    """The content of a JSON file; raises DataError with the path."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise DataError(f"{path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise DataError(f"{path}: not JSON: {e}") from None
