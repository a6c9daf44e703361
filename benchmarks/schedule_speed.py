"""Speed of schedules against full depth for the same work, whatever a checkpoint says under them.

    python benchmarks/schedule_speed.py runs/eval-e2e-* --model runs/e2e-full-b --out runs/speed-e2e.json

The schedules are those of finished runs of `skipdecode eval`; prompts and outputs are as long as the records' prompts
and references were there, and end tokens end nothing. Schedules of the same depths do the same work, whatever their
order of layers, so they are timed once. All of them and full depth take turns on each batch, several times over; the
median of a batch counts. Evaluations cannot tell this where their checkpoints differ: a model whose texts do not end
keeps its batches full, which is cheaper a token. Nothing else should run meanwhile. A file that has all depths already
is left alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from quality_table import load_runs, work_of
from tqdm import tqdm

from skipdecode import Schedule
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.kinds import heading, read_result
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.opening import open_fast
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation.generate import Outputs, Side, Timing, batches
from skipdecode.evaluation.methods.base import Generation
from skipdecode.evaluation.results import Run
from skipdecode.models.loading.hub import load_model

ROUNDS = 3


class Record(NamedTuple):
    """Lengths of a prompt and of its output, in tokens."""

    prompt: int
    output: int


def records_of(place: Path, limit: int) -> list[Record]:
    """The first records of a run."""
    with (place.parent / "outputs.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(limit), lines, strict=False)]
    return [Record(row["prompt_tokens"], row["reference_tokens"]) for row in rows]


def decode(fast: FastModel, schedule: Schedule, records: Sequence[Record]) -> Generation:
    """A batch, each row to its length; the same token ids in every call."""
    engine = FastEngine(fast, schedule, max_rows=len(records), in_order=True)
    requests = [Request(tuple(3 + (7 * i + j) % 50 for j in range(r.prompt)), r.output) for i, r in enumerate(records)]
    tokens = [row.tokens for row in engine.decode(requests)]
    stats = engine.stats
    return Generation(
        tokens, stats.prompt_seconds, stats.after_prompts, stats.token_layers, stats.fed_tokens, stats.steps
    )


def measure(fast: FastModel, schedules: Sequence[Schedule], records: Sequence[Record], size: int) -> list[Side]:
    """Times of each schedule over all records."""
    groups = [[records[i] for i in indices] for indices in batches([r.prompt for r in records], size)]
    found: dict[tuple[int, int], list[Generation]] = {}
    for schedule in schedules:
        decode(fast, schedule, [Record(r.prompt, 4) for r in groups[0]])
    turns = [(batch, turn) for _ in range(ROUNDS) for batch in range(len(groups)) for turn in range(len(schedules))]
    for batch, turn in tqdm(turns, unit="batch"):
        chosen = (batch + turn) % len(schedules)
        found.setdefault((chosen, batch), []).append(decode(fast, schedules[chosen], groups[batch]))
    timings = [Timing(rows_leave=True) for _ in schedules]
    for (chosen, _), rounds in sorted(found.items(), key=lambda item: item[0]):
        prompt, seconds = (median(getattr(g, name) for g in rounds) for name in ("prompt_seconds", "decode_seconds"))
        timings[chosen].add(replace(rounds[0], prompt_seconds=prompt, decode_seconds=seconds))
    return [Side([], timing) for timing in timings]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; returns 0, or 1 with one line that says what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="directories of runs: their schedules, the first's records")
    parser.add_argument("--model", required=True, help="directory of any checkpoint of the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, default=192, help="records (default: 192)")
    parser.add_argument("--out", type=Path, required=True, help="file for the speeds as JSON")
    options = parser.parse_args(argv)
    try:
        runs = load_runs(options.runs)
        done = measured(options.out) if options.out.exists() else []
        missing = [work for work in works_of(runs) if work not in done]
        if not missing:
            return 0
        # All anew, for only what took turns can be compared.
        works = [*done, *missing]
        loaded = load_model(options.model, dtype=options.dtype)
        fast = open_fast(loaded.model, "fast", lambda line: print(line, file=sys.stderr))
    except SkipDecodeError as e:
        print(f"schedule_speed: {e}", file=sys.stderr)
        return 1
    schedules = [Schedule.full(fast.num_layers), *(fast.suited(any_order(work)) for work in works)]
    records = records_of(runs[0].path, options.limit)
    full, *sides = measure(fast, schedules, records, options.batch_size)
    about = {"records": len(records), "batch_size": options.batch_size, "dtype": options.dtype, "engine": fast.name}
    write_whole(options.out, json.dumps(document(full, sides, works, about), indent=1) + "\n")
    return 0


def works_of(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """What the schedules of runs ask of an engine, each once."""
    given = [run.data["config"]["method"].get("schedule") for run in runs]
    return [json.loads(text) for text in dict.fromkeys(json.dumps(work_of(s)) for s in given if s is not None)]


def any_order(work: dict[str, Any]) -> Schedule:
    """A schedule that does the work."""
    layers = work["num_layers"]
    return Schedule(layers, tuple(range(1, layers - 1)), tuple(work["budgets"]), prompt=work["prompt"])


def measured(out: Path) -> list[dict[str, Any]]:
    """The work of an earlier call."""
    return [row["work"] for row in read_result(out, "schedule-speed")["rows"]]


def document(
    full: Side, sides: Sequence[Side], works: Sequence[dict[str, Any]], about: dict[str, Any]
) -> dict[str, Any]:
    """What is written."""
    rows = []
    for side, work in zip(sides, works, strict=True):
        outputs = Outputs(side, full)
        gain = outputs.speedup(seed=0, resamples=1000)
        rows.append(
            {
                "work": work,
                "measured_speedup": gain.estimate,
                "measured_speedup_interval": [gain.low, gain.high],
                "measured_speedup_with_prompt": outputs.speedup_with_prompt(),
                "speed": side.timing.to_dict(),
            }
        )
    return {
        **heading("schedule-speed"),
        "environment": environment(),
        "what": "decoding to the lengths of the references, all depths in turn on the same batches, medians of rounds",
        "rounds": ROUNDS,
        **about,
        "full_depth": full.timing.to_dict(),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
