"""The runs behind the published quality tables: tune, calibrate, evaluate, time and tabulate, in order.

    python benchmarks/quality_runs.py e2e --data path/to/e2e --runs runs
    python benchmarks/quality_runs.py ablations --data path/to/e2e --runs runs --dry-run
    python benchmarks/quality_runs.py any-speed --checkpoint adapter --data path/to/e2e --runs runs

`--data` holds train.jsonl, dev.jsonl and test.jsonl. What each table is made of stands in `quality_plans.py`. Finished
steps are left alone, so a killed call goes on where it was: tuning at its last checkpoint, evaluation after its last
batch. On two cores with bf16 products `e2e` takes about four hours, each of the others up to one; `ablations` and
`own` go on from its checkpoints. Nothing else should run while `schedule_speed.py` does.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftConfig
from quality_plans import CALIBRATED, PLANS, Checkpoint, Plan
from safetensors.torch import load_file, save_file
from shared import RESULTS, call, is_tuned
from transformers import AutoModelForCausalLM, AutoTokenizer

from skipdecode import Schedule
from skipdecode.models.carried import SCHEDULE_FILE
from skipdecode.models.loading.ref import ModelRef

HERE = Path(__file__).parent


def carry(adapter: Path, name: str) -> None:
    """Have an adapter carry one of the schedules that it was tuned under."""
    (schedule,) = (s for s in ModelRef(str(adapter)).recipe.tuned_under if s.name == name)
    schedule.save(adapter / SCHEDULE_FILE)
    config = PeftConfig.from_pretrained(adapter)
    config.auto_mapping = {"skipdecode": schedule.to_dict()}
    config.save_pretrained(adapter)


class Steps:
    """The steps of a plan, each skipped where its result is there."""

    def __init__(self, plan: Plan, data: Path, runs: Path, dry_run: bool) -> None:
        self.plan, self.data, self.runs, self.dry_run = plan, data, runs, dry_run
        # Schedules of tables with other lengths or layers must not meet under one name.
        self.schedules = runs if plan.prefix == "e2e" else runs / plan.prefix

    def call(self, *command: str | Path) -> None:
        """Show a command, and run it."""
        call(*command, dry_run=self.dry_run)

    def checkpoint(self, name: str) -> Path:
        """The directory of a checkpoint."""
        return self.runs / f"{self.plan.prefix}-{name}"

    def place(self, word: str) -> str:
        """A schedule's file, written first where it is not there, by its name; other words as they are."""
        if not word.endswith("x.json"):
            return word
        path = self.schedules / word
        name, speedup = word.removesuffix("x.json").rsplit("-", 1)
        if not path.exists() and name not in CALIBRATED:
            self.save(self.plan.schedule(name, float(speedup)), name, speedup)
        return str(path)

    def save(self, schedule: Schedule, name: str, speedup: str) -> None:
        """Write a schedule of a method and a speed-up, under their names."""
        named = replace(schedule, name="", family=name, variant="", speedup=float(speedup))
        self.schedules.mkdir(parents=True, exist_ok=True)
        named.save(self.schedules / f"{name}-{speedup}x.json")

    def tune(self, name: str, made: Checkpoint) -> None:
        """A checkpoint, all weights."""
        out = self.checkpoint(name)
        if is_tuned(out):
            if made.carries and not self.dry_run:
                carry(out, made.carries)
            return
        data = self.answers(made.answers) if made.answers else self.data
        files = ["--train", data / made.train, "--dev", data / "dev.jsonl", "--out", out]
        if made.preset:
            self.call("skipdecode", "tune", "--recipe", HERE.parent / "presets" / made.preset, *files)
            if not self.dry_run:
                carry(out, made.carries)
            return
        base = self.checkpoint(made.base) if made.base else self.base()
        if made.averaged:
            base = self.average(Path(base), *made.averaged)
        every = ["--eval-every", "75", "--checkpoint-every", "75"]
        options = map(self.place, made.options)
        head = ["skipdecode", "tune", base, "--task", self.plan.task]
        self.call(*head, *files, "--full", *self.plan.common, *every, *options)

    def make(self, name: str) -> None:
        """One checkpoint, and first those that it stands on."""
        if name not in self.plan.checkpoints:  # another table's, made before
            return
        made = self.plan.checkpoints[name]
        for other in dict.fromkeys(filter(None, (made.base, *(made.averaged or ())[:1], made.answers))):
            self.make(other)
        if self.plan.calibration and any(option.startswith(CALIBRATED) for option in made.options):
            self.calibrate()
        self.tune(name, made)

    def answers(self, name: str) -> Path:
        """The directory of a checkpoint's answers to the training prompts."""
        checkpoint = self.checkpoint(name)
        out = checkpoint.with_name(f"{checkpoint.name}-answers")
        if not (out / "train.jsonl").exists():
            script = [sys.executable, HERE / "quality_answers.py", checkpoint]
            self.call(*script, "--task", self.plan.task, "--data", self.data, "--out", out)
        return out

    def average(self, first: Path, second: str, share: float) -> Path:
        """A checkpoint whose weights lie between those of two, `share` of the way to the second."""
        out, file = first.with_name(f"{first.name}-{second}-{share}"), "model.safetensors"
        if not self.dry_run and not (out / file).exists():
            shutil.copytree(
                first, out, ignore=shutil.ignore_patterns("checkpoints", "log.jsonl", file), dirs_exist_ok=True
            )
            ours, theirs = load_file(first / file), load_file(self.checkpoint(second) / file)
            mean = {name: torch.lerp(weight, theirs[name], share) for name, weight in ours.items()}
            save_file(mean, out / "partial", metadata={"format": "pt"})
            (out / "partial").rename(out / file)
        return out

    def base(self) -> str | Path:
        """The untuned model."""
        if self.plan.model != "gemma3-270m":
            return self.plan.model
        out = self.runs / self.plan.model
        if not out.exists():
            self.call(sys.executable, HERE / "packaged_checkpoint.py", "gemma3-270m", out)
        return out

    def calibrate(self) -> None:
        """The drop order, and a schedule for each speed-up, all from one measurement on the start's weights in bf16."""
        start = self.checkpoint(self.plan.start)
        rounded = start.with_name(f"{start.name}-bf16")
        if not self.dry_run and not (rounded / "tokenizer.json").exists():
            AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16).save_pretrained(rounded)
            AutoTokenizer.from_pretrained(start).save_pretrained(rounded)
        head = [sys.executable, HERE / "calibrate.py", rounded, "--task", self.plan.task]
        head += ["--data", self.data / "train.jsonl"]
        out = self.checkpoint("calibration")
        shape = [*self.plan.calibration, "--seq-len", self.plan.seq_len, "--out", out]
        for speedup in sorted(self.plan.speedups, reverse=True):
            if (self.schedules / f"calibrated-{speedup}x.json").exists():
                continue
            self.call(*map(str, [*head, "--nominal-speedup", speedup, *shape]))
            if not self.dry_run:
                for kind in ("json", "png"):
                    shutil.copy(out / f"calibration.{kind}", out / f"calibration-{speedup}x.{kind}")
                found = Schedule.from_json((out / "schedule.json").read_text(encoding="utf-8"))
                for name, schedule in self.plan.calibrated(found, speedup).items():
                    self.save(schedule, name, str(speedup))

    def evaluate(self, name: str, methods: Sequence[str]) -> None:
        """Those methods on the test records that have not been there yet. Greedy, bf16."""
        out = self.evaluation(name)
        record = out / "methods.txt"
        done = record.read_text(encoding="utf-8").split() if record.exists() else []
        methods = [m for m in methods if m not in done]
        if not methods:
            return
        head = ["skipdecode", "eval", self.checkpoint(name), "--task", self.plan.task]
        data = ["--data", self.data / "test.jsonl", "--dtype", "bfloat16", "--no-teacher-forced"]
        if "full" not in methods:
            data.append("--no-full-depth")  # The yardstick is another checkpoint's, and speed is measured apart.
        about = ["--bertscore-model", "minilm", "--name", self.checkpoint(name).name]
        chosen = ["--out", out, "--methods", *map(self.place, methods)]
        self.call(*head, *data, *self.plan.evaluation, *about, *chosen)
        if not self.dry_run:
            record.write_text("\n".join([*done, *methods, ""]), encoding="utf-8")

    def evaluation(self, name: str) -> Path:
        """The directory of a checkpoint's evaluation."""
        return self.runs / f"eval-{self.plan.prefix}-{name}"

    def run(self) -> None:
        """All of it."""
        plan = self.plan
        if plan.start in plan.checkpoints:
            self.tune(plan.start, plan.checkpoints[plan.start])
            if plan.calibration:
                self.calibrate()
        for name, made in plan.checkpoints.items():
            self.tune(name, made)
        for name, made in plan.checkpoints.items():
            self.evaluate(name, made.methods)
        evaluations = [self.evaluation(name) for name, made in plan.checkpoints.items() if made.methods]
        # Of all tables with the same records and lengths.
        speeds = self.time(evaluations)
        full = self.evaluation(plan.yardstick) / "full"
        script = [sys.executable, HERE / "quality_table.py", *evaluations, "--full", full]
        self.call(*script, *speeds, *self.beside(), "--out", RESULTS / plan.results)

    def beside(self) -> list[str | Path]:
        """The option that names an earlier table."""
        return ["--beside", RESULTS / self.plan.beside] if self.plan.beside else []

    def time(self, evaluations: Sequence[Path]) -> list[str | Path]:
        """All schedules in turn; returns the table's options that name the files."""
        plan = self.plan
        timing = [sys.executable, HERE / "schedule_speed.py", *evaluations, "--model", self.checkpoint(plan.yardstick)]
        speed, alone = (self.runs / f"speed-{name}.json" for name in (plan.speeds, f"{plan.speeds}-1"))
        timing += self.beside()
        self.call(
            *timing, *plan.evaluation, *plan.timing, *(["--transformers"] if plan.request else []), "--out", speed
        )
        if not plan.request:
            return ["--speed", speed]
        self.call(*timing, "--batch-size", "1", "--limit", "24", "--out", alone)
        return ["--speed", speed, "--speed-alone", alone]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; returns the exit code of the first command that fails, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tuple(PLANS))
    parser.add_argument("--data", type=Path, required=True, help="directory with train.jsonl, dev.jsonl and test.jsonl")
    parser.add_argument("--runs", type=Path, required=True, help="directory for checkpoints and evaluations")
    parser.add_argument("--checkpoint", help="make this one, and those that it stands on, and no table")
    parser.add_argument("--dry-run", action="store_true", help="show the commands only")
    options = parser.parse_args(argv)
    options.runs.mkdir(parents=True, exist_ok=True)
    plan = PLANS[options.table]
    if options.checkpoint not in (None, *plan.checkpoints):
        parser.error(f"--checkpoint {options.checkpoint}: {options.table} has {', '.join(plan.checkpoints)}")
    steps = Steps(plan, options.data, options.runs, options.dry_run)
    try:
        steps.make(options.checkpoint) if options.checkpoint else steps.run()
    except subprocess.CalledProcessError as e:
        return int(e.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())
