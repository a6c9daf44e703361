"""The rows of several runs of `skipdecode prepare` as one result file.

    python benchmarks/prepared_rows.py code=runs/code e2e=runs/e2e --out results/prepare-qwen2.5-coder-0.5b.json

Each argument names a task and the `--out` of its run. `wall_minutes` is the sum of the stages' times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared import script_parser, write_result


def rows(task: str, out: Path) -> list[dict[str, Any]]:
    """What one run measured of each way."""
    found = json.loads((out / "prepared.json").read_text(encoding="utf-8"))
    batch = json.loads((out / "fit" / "calibration.json").read_text(encoding="utf-8"))["cost"]["batch"]
    shared = {"task": task, "model": Path(found["model"]).name, "batch": batch, "seconds_by_stage": found["seconds"]}
    shared["wall_minutes"] = round(sum(found["seconds"].values()) / 60, 1)
    named = ("minutes", "request_speedup", "decode_speedup", "kept", "kept_interval", "scores")
    return [{**shared, "lever": row["name"], **{name: row[name] for name in named}} for row in found["rows"]]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="TASK=DIRECTORY")
    options = parser.parse_args()
    pairs = [run.partition("=")[::2] for run in options.runs]
    write_result(options.out, "prepared-rows", {"rows": [r for task, out in pairs for r in rows(task, Path(out))]})


if __name__ == "__main__":
    main()
