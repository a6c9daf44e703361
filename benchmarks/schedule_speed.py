"""Speed of schedules against full depth for the same work, whatever a checkpoint says under them.

    python benchmarks/schedule_speed.py runs/eval-e2e-* --model runs/e2e-full-b --out runs/speed-e2e.json

The schedules are those of finished runs of `skipdecode eval`; prompts and outputs are as long as the records' prompts
and references were there, and end tokens end nothing. Schedules of the same depths do the same work, whatever their
order of layers, so they are timed once. All of them and full depth take turns on each batch, several times over; the
median of a batch counts (`skipdecode.evaluation.methods`, which evaluations use too, on fewer records). This is for
tables of several evaluations: one machine, one session, all depths in turn. Nothing else should run meanwhile. A file
that has all depths already is left alone. A fit of --model takes its time too: give schedules of its drop order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quality_table import load_runs, work_of
from shared import script_parser, write_result

from skipdecode import Schedule
from skipdecode.common.jsonl import read_result
from skipdecode.common.progress import progress_bar
from skipdecode.engine.opening import Backend, open_engines
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation.methods import ROUNDS, WHAT, Method, Turns, medians_of, speed_entries, time_equal_lengths
from skipdecode.evaluation.results import EvaluationSettings
from skipdecode.models.loading.hub import load_model


def records_of(place: Path, limit: int) -> tuple[list[list[int]], list[int]]:
    """Of the first records of a run: prompts of their lengths, whatever they say, and the lengths of their outputs."""
    with (place.parent / "outputs.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]
    prompts = [[3 + (7 * i + j) % 50 for j in range(row["prompt_tokens"])] for i, row in enumerate(rows)]
    return prompts, [row["reference_tokens"] for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; returns 0, or 1 with one line that says what was wrong."""
    parser = script_parser(__doc__)
    parser.add_argument("runs", nargs="+", help="directories of runs: their schedules, the first's records")
    parser.add_argument("--model", required=True, help="directory of any checkpoint of the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, default=192, help="records (default: 192)")
    parser.add_argument("--transformers", action="store_true", help="also full depth through transformers")
    parser.add_argument("--beside", type=Path, help="a table of earlier evaluations whose schedules are timed too")
    options = parser.parse_args(argv)
    try:
        runs = load_runs(options.runs)
        done = measured(options.out) if options.out.exists() else []
        given = [run.data["config"]["method"].get("schedule") for run in runs]
        if options.beside is not None:
            given += [row["decoding"].get("schedule") for row in read_result(options.beside, "quality-table")["runs"]]
        missing = [work for work in works_of(given) if work not in done]
        if not missing:
            return 0
        # All anew, for only what took turns can be compared.
        works = [*done, *missing]
        loaded = load_model(options.model, dtype=options.dtype)
        source = open_engines(loaded.model, "fast", lambda line: print(line, file=sys.stderr))
    except SkipDecodeError as e:
        print(f"schedule_speed: {e}", file=sys.stderr)
        return 1
    order = max((s["drop_order"] for s in given if s is not None), key=len)
    methods = [Method(source), *(Method(source, with_order(work, order)) for work in works)]
    methods += [Method(Backend(loaded.model))] if options.transformers else []
    prompts, lengths = records_of(runs[0].path, options.limit)
    size = options.batch_size
    with progress_bar(ROUNDS * len(prompts), "record") as bar:
        turns = time_equal_lengths(methods, prompts, lengths, batch_size=size, progress=bar.update)
    about = {"records": len(prompts), "batch_size": size, "dtype": options.dtype, "engine": source.name}
    write_result(options.out, "schedule-speed", what_was_found(turns, works, about))
    return 0


def works_of(given: Sequence[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """What schedules ask of an engine, each once."""
    return [json.loads(text) for text in dict.fromkeys(json.dumps(work_of(s)) for s in given if s is not None)]


def with_order(work: dict[str, Any], order: Sequence[int]) -> Schedule:
    """A schedule that does the work; where the work has no drop order, in this one and then any."""
    layers = work["num_layers"]
    rest = (layer for layer in range(1, layers - 1) if layer not in order)
    order = work.get("drop_order", (*order, *rest))
    return Schedule(layers, tuple(order), tuple(work["budgets"]), prompt=work["prompt"])


def measured(out: Path) -> list[dict[str, Any]]:
    """The work of an earlier call."""
    return [row["work"] for row in read_result(out, "benchmark")["rows"]]


def what_was_found(turns: Turns, works: Sequence[dict[str, Any]], about: dict[str, Any]) -> dict[str, Any]:
    """The entries of the result; full depth's times come first."""
    full, *others = turns.sides
    rows = []
    theirs = others[len(works)] if len(others) > len(works) else None
    for method, work in zip(others, works, strict=False):
        found = speed_entries(turns, method, full, EvaluationSettings(), {})
        bounds = {name: value and [value["low"], value["high"]] for name, value in found.items() if "_interval" in name}
        rows.append({"work": work, **found, **bounds})
        del rows[-1]["full_depth_speed"]
    return {
        "what": WHAT,
        "rounds": ROUNDS,
        **about,
        "full_depth": medians_of(turns, full),
        "transformers": theirs and medians_of(turns, theirs),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
