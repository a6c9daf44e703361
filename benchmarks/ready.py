"""What a model keeps after minutes of preparation, fitted and without fits: `skipdecode prepare` on several tasks.

    python benchmarks/ready.py --data path/to/data --minutes 0 10 --cpu-clock --work runs/ready \\
      --out results/ready-smollm2-135m.json

Every task starts from a checkpoint at full depth, and learns that checkpoint's greedy
answers. `kept` is the worst of BLEU, ROUGE-L and BERT-F on E2E, of the last two on summaries, and 1 / perplexity ratio
in chats; full depth of the same table is 1. On a shared machine, `--cpu-clock`
counts minutes of this process's CPU time, on one thread. A run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shared import TASKS as TASK_FILES
from shared import script_parser, write_result
from tqdm import tqdm

from skipdecode.cli import main as skipdecode

SELF = ["--self", "--self-temperature", "0", "--bertscore-model", "minilm"]


class Task(NamedTuple):
    """A checkpoint that knows the task (empty: --checkpoint names one), the target, the scores to keep."""

    checkpoint: str
    target: float
    scores: tuple[str, ...]
    options: list[str]


SUMMARY = ("rougeL", "bertscore_f1")
RECORDS = "--self-records {} --self-tokens {} --test-records {}"
TASKS = {
    "e2e": Task("e2e-smollm2-135m", 1.6, ("bleu", *SUMMARY), RECORDS.format(320, 64, 128).split()),
    "chat": Task("smollm2-135m", 1.25, ("1 / perplexity",), RECORDS.format(260, 96, 64).split()),
    "cnn_dm": Task("", 1.9, SUMMARY, RECORDS.format(320, 96, 64).split()),
    "tldr": Task("", 1.85, SUMMARY, RECORDS.format(320, 80, 128).split()),
}
METHODS = {"fitted": [], "fitted, no tap": ["--fit-taps", "0"], "without fits": ["--no-fit"]}


def prepared(task: str, method: str, minutes: float, options: argparse.Namespace) -> dict[str, Any]:
    """What `skipdecode prepare` says of a task."""
    target, more = options.target or TASKS[task].target, [*TASKS[task].options, *options.more.split()]
    name = " ".join([task, method, f"{target:g}x", options.more])
    out, files = options.work / "-".join(name.replace("--", "").split()), []
    if task != "chat":
        files = [
            f"--{name}={options.data / task / file}.jsonl" for name, file in (("prompts", "train"), ("test", "test"))
        ]
        files += ["--task", task if task == "e2e" else str(TASK_FILES / f"{task}.yaml")]
    model = options.checkpoint or TASKS[task].checkpoint
    command = ["prepare", model, "--target-speedup", str(target), *SELF, *more, *files, *METHODS[method]]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = skipdecode([*command, "--minutes", f"{minutes:g}", "--out", str(out), "--json"])
    if code:
        sys.exit(code)
    found: dict[str, Any] = json.loads(said.getvalue())
    return found | {"answers": sum(1 for _ in (out / "answers" / "self.jsonl").open(encoding="utf-8"))}


def rows(task: str, method: str, minutes: float, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Full depth, the target and its neighbours after some minutes; nothing if order and fit took all of them."""
    full = [row["scores"] for row in found["rows"] if row["full_depth"]]
    best = {name: max(scores[name] for scores in full) for name in TASKS[task].scores}
    stages = found["cpu_seconds"]
    tuning = stages.get(f"tuning {found['minutes']:g}", 0.0)
    return [
        {
            "task": task,
            "method": method,
            "answers": found["answers"],
            "minutes": row["minutes"],
            "schedule": row["name"],
            "role": "full" if row["full_depth"] else row["name"].partition(", ")[2] or "target",
            "request_speedup": row["request_speedup"],
            "kept": min(row["scores"][name] / score for name, score in best.items()),
            "copied": row.get("copied"),
            "perplexity_ratio": row.get("perplexity_ratio"),
            "scores": row["scores"],
            "cpu_minutes": round((stages["layers"] + (tuning if row["minutes"] else 0)) / 60, 2),
        }
        for row in found["rows"]
        if row["minutes"] == minutes
    ]


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory with e2e/train.jsonl, e2e/test.jsonl")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["fitted", "without fits"])
    parser.add_argument("--minutes", nargs="+", type=float, default=[0.0, 10.0])
    parser.add_argument("--checkpoint", help="a checkpoint that was tuned on the task at full depth")
    parser.add_argument("--target", type=float, help="request speed-up, in place of the one of each task")
    parser.add_argument("--more", default="", help="further options of prepare, such as '--self-records 995'")
    parser.add_argument("--cpu-clock", action="store_true", help="minutes of CPU time on one thread, not of the clock")
    parser.add_argument("--work", type=Path, required=True, help="directory of the runs")
    options = parser.parse_args()
    if options.cpu_clock:
        torch.set_num_threads(1)
        time.perf_counter = time.process_time  # every measurement of the package reads it
    found: list[dict[str, Any]] = []
    wanted = [(t, m, n) for t in options.tasks for m in options.methods for n in sorted(options.minutes)]
    for task, method, minutes in tqdm(wanted, unit="run"):
        found += rows(task, method, minutes, prepared(task, method, minutes, options))
        about = {"clock": "CPU time of one thread" if options.cpu_clock else "wall clock"}
        write_result(options.out, "ready", {**about, "rows": found})


if __name__ == "__main__":
    main()
