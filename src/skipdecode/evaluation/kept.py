"""Scores that schedules keep: rows of evaluations, and the fastest that keeps a share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from skipdecode.evaluation.metrics import METRICS

_NOISE = 1.05  # of speed-ups
PERPLEXITY = "1 / perplexity"
_FULL_DEPTH = ("base", "full")
Row = Mapping[str, Any]


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each schedule in the JSON output of `skipdecode eval`: name, speed-ups, scores (higher is better)."""
    if "runs" in document:
        return [_speeds(run) | _task_scores(run) for run in document["runs"]]
    return [_speeds(row) | _self_scores(row) for row in document["rows"]]


def _speeds(found: Row) -> dict[str, Any]:
    full = found["name"] in _FULL_DEPTH  # a schedule that shortens prompts alone has a nominal speed-up of 1 too
    request, decode = (1.0 if full else found.get(name) for name in ("request_speedup", "decode_speedup"))
    how = found.get("config", {}).get("method", found)
    more = {name: how[name] for name in ("quantization", "exact") if name in how}
    more |= {name: found.get(name) for name in ("nominal_speedup", "request_speedup_interval", "request_speedup_alone")}
    return {"name": found["name"], "full_depth": full, "request_speedup": request, "decode_speedup": decode} | more


def _task_scores(run: Row) -> dict[str, Any]:
    metrics = run["metrics"]
    scores = {name: entry["score"] for name, entry in metrics.items() if name in METRICS}
    return {"copied": metrics.get("copied", {}).get("score"), "scores": scores, "shares": run.get("kept", {})}


def _self_scores(found: Row) -> dict[str, Any]:
    worse = found["of_base"]
    ratio = worse["estimate"]
    share = {"estimate": 1 / ratio, "low": 1 / worse["high"], "high": 1 / worse["low"]}
    return {"perplexity_ratio": ratio, "scores": {PERPLEXITY: 100 / ratio}, "shares": {PERPLEXITY: share}}


def with_kept(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with the share of full depth's scores that each keeps: the smallest over all scores.

    If there are several rows of full depth, a score is compared with the best of them. Scores that are 0 at full depth
    do not count; without any other, `kept` is None. `kept_interval` is the 95% interval of `kept`, if it is known: if
    the score is compared with full depth of the same evaluation, which `shares` are about.
    """
    full = [row["scores"] for row in rows if row["full_depth"]]
    best = {name: max(scores.get(name, 0.0) for scores in full) for name in full[0]}
    best = {name: score for name, score in best.items() if score}
    return [{**row} | _least(row, {name: row["scores"][name] / score for name, score in best.items()}) for row in rows]


def _least(row: Row, shares: Mapping[str, float]) -> dict[str, Any]:
    """The smallest share, with its interval."""
    if not shares:
        return {"kept": None, "kept_interval": None}
    name, kept = min(shares.items(), key=lambda entry: entry[1])
    own = row.get("shares", {}).get(name)
    known = own is not None and not row["full_depth"] and math.isclose(own["estimate"], kept, rel_tol=1e-6)
    return {"kept": kept, "kept_interval": {"low": own["low"], "high": own["high"]} if known else None}


def fastest_that_keeps(rows: Sequence[Row], share: float) -> Row | None:
    """The row with the largest request speed-up above 1 that keeps a share; None if there is none."""
    found = [row for row, kept in measured(rows) if kept >= share and row["request_speedup"] > 1]
    return max(found, key=lambda row: row["request_speedup"], default=None)


def impossible(rows: Sequence[Row]) -> Iterator[str]:
    """What the rows of one checkpoint say that cannot be: fewer layers in clearly more time."""
    for (deep, _), (fast, _) in permutations(measured(rows), 2):
        alike = all(deep.get(name) == fast.get(name) for name in ("minutes", "quantization", "exact"))
        speeds = fast["request_speedup"], deep["request_speedup"]
        if alike and fast["nominal_speedup"] > deep["nominal_speedup"] and _NOISE * speeds[0] < speeds[1]:
            less = f"{fast['name']}, with fewer layers than {deep['name']}, was measured {speeds[0]:.2f}x"
            yield f"{less} against {speeds[1]:.2f}x: other work disturbed the measurement, repeat it"


def kept_columns(rows: Sequence[Row]) -> dict[str, str]:
    """Columns of a table of the rows, with their formats."""
    return {
        "schedule": "{name}",
        "minutes": "{minutes:g}",
        "request": "{request_speedup:.2f}x",
        "request, interval": "{request_speedup_interval[low]:.2f} to {request_speedup_interval[high]:.2f}",
        "request, batch 1": "{request_speedup_alone:.2f}x",
        "decode": "{decode_speedup:.2f}x",
        "kept": "{kept:.1%}",
        "copied": "{copied:.1f}%",
        **dict(_column(name) for name in rows[0]["scores"]),
    }


def _column(score: str) -> tuple[str, str]:
    """The heading and the format of a score; of the perplexity, how many times as high as before it is."""
    if score == PERPLEXITY:
        return "perplexity against before", "{perplexity_ratio:.2f} times"
    return score, f"{{scores[{score}]:.1f}}"


def measured(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """The schedules whose speed-up and kept share are known, with the share."""
    for row in rows:
        if row["request_speedup"] is not None and row["kept"] is not None and not row["full_depth"]:
            yield row, row["kept"]
