"""The runs behind the published quality tables: tune, calibrate, evaluate, time and tabulate, in order.

    python benchmarks/quality_runs.py e2e --data path/to/e2e --runs runs
    python benchmarks/quality_runs.py ablations --data path/to/e2e --runs runs --dry-run

`--data` holds train.jsonl, dev.jsonl and test.jsonl. Finished steps are left alone, so a killed call goes on where it
was: tuning at its last checkpoint, evaluation after its last batch. On two cores with bf16 products `e2e` takes about
five hours; `ablations`, another two, starts from its first checkpoint. Nothing else should run while the timing step
does.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skipdecode import Schedule
from skipdecode.methods.schedules import Budget, build_schedule

LAYERS = 30
SEQ_LEN, MEDIAN = 41, 25  # 95th percentile and median of the training responses' lengths
SPEEDUPS = (2, 3, 4, 5)
BASE, START, CALIBRATION = "smollm2-135m", "e2e-full-a", "e2e-calibration"

FIRST = ["--nominal-speedup", "1", "--seq-len", str(SEQ_LEN), "--steps", "300"]
SECOND = ["--steps", "450", "--curriculum", "sampled", "--sampled-speedups", "2", "3", "4", "--distill-weight", "0.5"]
SHORT = ["--steps", "225", "--distill-weight", "0.5"]


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint starts from, what it is tuned with, and the methods it is evaluated with."""

    base: str
    options: Sequence[str]
    methods: Sequence[str]


def files(name: str, *speedups: int) -> list[str]:
    """The schedule files of a method, one for each speed-up."""
    return [f"{name}-{speedup}x.json" for speedup in speedups or SPEEDUPS]


def second(order: str, *more: str) -> Checkpoint:
    """Tuned on from the start under an order's schedules, all speed-ups."""
    return Checkpoint(START, ["--schedule", f"{order}-5x.json", *SECOND], [*files(order), *more])


E2E = {
    START: Checkpoint(BASE, FIRST, ["full"]),
    "e2e-paper-b": Checkpoint(
        START,
        ["--nominal-speedup", "5", "--seq-len", str(SEQ_LEN), *SECOND],
        ["full", *files("paper"), *files("d3", 3, 5), "calm", "prompt_lookup"],
    ),
    "e2e-cal-b": second("calibrated", *files("curve"), *files("pruned", 3, 5)),
    "e2e-even-b": second("even", *files("unified", 3, 5)),
    "e2e-full-b": Checkpoint(START, [*FIRST[:-1], "450"], ["full", "prompt_lookup"]),
    "e2e-top-b": second("early_termination"),
}
# At 3x, one schedule a checkpoint, half the steps: what each setting of the paper's schedule is worth.
ABLATIONS = {
    f"e2e-3x-{name}": Checkpoint(START, ["--schedule", f"{name}-3x.json", *SHORT], [f"{name}-3x.json"])
    for name in ("paper", "warmup0", "warmup2", "warmup4", "flat", "max_exit", "median", "calibrated")
} | {"e2e-3x-plain": Checkpoint(START, ["--schedule", "paper-3x.json", *SHORT[:2]], ["paper-3x.json"])}


def make_schedules(runs: Path) -> None:
    """Write every schedule that needs no calibration."""
    most = Budget(LAYERS, SPEEDUPS[-1], SEQ_LEN)
    orders = {name: build_schedule(name, most).drop_order for name in ("even", "early_termination")}
    for speedup in SPEEDUPS:
        linear = Schedule.from_speedup(LAYERS, speedup, SEQ_LEN)
        save(runs, linear, f"paper-{speedup}x")
        for name, order in orders.items():
            save(runs, replace(linear, drop_order=order), f"{name}-{speedup}x")
        flat = Schedule.constant(LAYERS, round(LAYERS / speedup), drop_order=orders["even"])
        save(runs, flat, f"unified-{speedup}x")
        save(runs, build_schedule("d3", Budget(LAYERS, speedup, SEQ_LEN)), f"d3-{speedup}x")
    three = Schedule.from_speedup(LAYERS, 3, SEQ_LEN)
    for layers in (0, 2, 4):
        save(runs, Schedule.from_speedup(LAYERS, 3, SEQ_LEN, warmup_layers=layers), f"warmup{layers}-3x")
    save(runs, Schedule.constant(LAYERS, LAYERS // 3), "flat-3x")
    save(runs, replace(three, prompt="max_exit"), "max_exit-3x")
    save(runs, Schedule.from_speedup(LAYERS, 3, MEDIAN), "median-3x")


def save(runs: Path, schedule: Schedule, name: str) -> None:
    """Write a schedule under a name."""
    (runs / f"{name}.json").write_text(replace(schedule, name=name).to_json() + "\n", encoding="utf-8")


class Steps:
    """The steps, each skipped where its result is there."""

    def __init__(self, data: Path, runs: Path, dry_run: bool) -> None:
        self.data, self.runs, self.dry_run = data, runs, dry_run

    def call(self, *command: str | Path) -> None:
        """Show a command, and run it."""
        words = list(map(str, command))
        print("$", shlex.join(words), flush=True)
        if not self.dry_run:
            subprocess.run(words, check=True)

    def place(self, word: str) -> str:
        """A schedule file or checkpoint of ours by its path, other words as they are."""
        return str(self.runs / word) if word.endswith(".json") or word.startswith("e2e-") else word

    def tune(self, name: str, made: Checkpoint) -> None:
        """A checkpoint, all weights."""
        if (self.runs / name / "model.safetensors").exists():
            return
        train, dev = self.data / "train.jsonl", self.data / "dev.jsonl"
        common = [
            "--full",
            "--batch-size",
            "16",
            "--learning-rate",
            "3e-4",
            "--eval-every",
            "75",
            "--checkpoint-every",
            "75",
        ]
        options = [self.place(o) for o in made.options]
        head = ["skipdecode", "tune", self.place(made.base), "--task", "e2e", "--train", train, "--dev", dev]
        self.call(*head, "--dev-records", "128", "--out", self.runs / name, "--resume", *common, *options)

    def calibrate(self) -> None:
        """Drop order and a curve for each speed-up, all from one measurement on the start's weights in bf16."""
        rounded = self.runs / f"{START}-bf16"
        if not self.dry_run and not rounded.exists():
            AutoTokenizer.from_pretrained(self.runs / START).save_pretrained(rounded)
            AutoModelForCausalLM.from_pretrained(self.runs / START, dtype=torch.bfloat16).save_pretrained(rounded)
        out, train = self.runs / CALIBRATION, self.data / "train.jsonl"
        for speedup in SPEEDUPS[::-1]:
            if (self.runs / f"calibrated-{speedup}x.json").exists():
                continue
            head = ["skipdecode", "calibrate", rounded, "--task", "e2e", "--data", train, "--nominal-speedup", speedup]
            self.call(
                *map(str, head), "--least", "3", "--batch-size", "32", "--seq-len", SEQ_LEN, "--resume", "--out", out
            )
            if not self.dry_run:
                curve = Schedule.from_json((out / "schedule.json").read_text(encoding="utf-8"))
                linear = Schedule.from_speedup(LAYERS, speedup, SEQ_LEN)
                save(self.runs, curve, f"curve-{speedup}x")
                save(self.runs, replace(linear, drop_order=curve.drop_order), f"calibrated-{speedup}x")
                flat = Schedule.constant(LAYERS, round(LAYERS / speedup), drop_order=curve.drop_order)
                save(self.runs, flat, f"pruned-{speedup}x")

    def evaluate(self, name: str, out: str, methods: Sequence[str], *more: str) -> None:
        """Methods on the test records. Greedy, bf16, 32 rows at a time."""
        head = ["skipdecode", "eval", self.runs / name, "--task", "e2e", "--data", self.data / "test.jsonl"]
        shape = ["--dtype", "bfloat16", "--batch-size", "32", "--no-teacher-forced"]
        self.call(*head, *shape, *more, "--out", self.runs / out, "--methods", *map(self.place, methods))


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; returns the exit code of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("e2e", "ablations"))
    parser.add_argument("--data", type=Path, required=True, help="directory with train.jsonl, dev.jsonl and test.jsonl")
    parser.add_argument("--runs", type=Path, required=True, help="directory for checkpoints and evaluations")
    parser.add_argument("--dry-run", action="store_true", help="show the commands only")
    options = parser.parse_args(argv)
    checkpoints = E2E if options.table == "e2e" else ABLATIONS
    steps = Steps(options.data, options.runs, options.dry_run)
    options.runs.mkdir(parents=True, exist_ok=True)
    make_schedules(options.runs)
    try:
        steps.tune(START, E2E[START])
        steps.calibrate()
        for name, made in checkpoints.items():
            steps.tune(name, made)
        for name, made in checkpoints.items():
            steps.evaluate(name, f"eval-{name}", made.methods, "--bertscore-model", "minilm", "--name", name)
        every = dict.fromkeys(m for made in checkpoints.values() for m in made.methods)
        timing = f"timing-{options.table}"
        steps.evaluate(START, timing, list(every), "--limit", "64", "--metrics", "rougeL", "--seed", "0")
        evaluations = [options.runs / f"eval-{name}" for name in checkpoints]
        full = options.runs / "eval-e2e-full-b" / "full"
        out = f"results/{options.table}-smollm2-135m.json"
        table = Path(__file__).with_name("quality_table.py")
        steps.call(sys.executable, table, *evaluations, "--full", full, "--speed", options.runs / timing, "--out", out)
    except subprocess.CalledProcessError as e:
        return int(e.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
