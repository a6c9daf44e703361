"""What only a GPU can show, in order of worth, within the minutes there are; small files.

    python benchmarks/gpu_round.py --minutes 25 --data DIR --out gpu-round
    python benchmarks/gpu_round.py --rehearse --out rehearsal

1. The tests marked `gpu`.
2. transformers under schedules ("gated") against transformers' own `generate`, and vLLM where it is installed, at the
   sizes of OPT-1.3B and OPT-6.7B with random weights: batch 1, 8, 32, 128, full depth and 2x, 3x, 5x, with shares of
   the bandwidth.
3. E2E, CNN/DailyMail and TL;DR: all weights tuned for 1x, 2x, 3x and 5x at once, evaluated at each. `--data` holds
   folders e2e, cnn_dm and tldr with train.jsonl, dev.jsonl and test.jsonl; a task without its folder is left out.

Each step has a share of the time. One that takes twice as long is stopped, one for which none is left is skipped, and
what a step did not use goes to those after it; after every step `round.json` says what became of each. A result is put
into `--out` when it is whole; weights stay in `--work`. A second call with the same `--out` does what is not done yet.
`--rehearse` goes through all steps on a CPU with tiny sizes, in two minutes or so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole

HERE = Path(__file__).parent
SKIPDECODE = [sys.executable, "-m", "skipdecode.cli"]
SPEEDUPS = ("2", "3", "5")
TASKS = {"e2e": "e2e", "cnn_dm": str(HERE / "tasks" / "cnn_dm.yaml"), "tldr": str(HERE / "tasks" / "tldr.yaml")}
_PROBE_STEPS = 5
_LEAST_SECONDS = 20


@dataclass(frozen=True)
class Step:
    """A piece of work.

    Parameters
    ----------
    name : str
        For the log; also the result's file.
    share : float
        Of the time of all.
    command : callable
        From its seconds, and the path that takes its result, to the command.
    """

    name: str
    share: float
    command: Callable[[float, Path], Sequence[str]]
    suffix: str = "json"


class Round:
    """Runs steps one after the other, and says what became of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out, self.work = options.out, options.work or Path(tempfile.mkdtemp(prefix="gpu-round-"))
        self.end = time.monotonic() + 60 * options.minutes
        self.steps: dict[str, dict[str, object]] = {}

    def run(self, steps: Sequence[Step]) -> None:
        """All steps, as far as the time goes."""
        shares = sum(step.share for step in steps)
        for step in steps:
            left = self.end - time.monotonic()
            self._one(step, left, left * step.share / shares)
            shares -= step.share
            write_whole(self.out / "round.json", json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict[str, object]:
        """What was done where."""
        settings = {k: str(v) for k, v in vars(self.options).items() if v is not None}
        return {"environment": environment(), "options": settings, "steps": self.steps}

    def _one(self, step: Step, left: float, seconds: float) -> None:
        result, log = self.out / f"{step.name}.{step.suffix}", self.out / f"{step.name}.log"
        if result.exists():
            self.steps[step.name] = {"state": "done before"}
            return
        if left < _LEAST_SECONDS:
            self.steps[step.name] = {"state": "skipped: no time was left"}
            return
        # It may take from those after it: they are worth less.
        limit = min(left, 2 * seconds)
        made, began = self.work / result.name, time.monotonic()
        made.unlink(missing_ok=True)
        print(f"{step.name}: {seconds:.0f} s, {left:.0f} s are left in all", flush=True)
        state = _run(step.command(seconds, made), log, limit)
        if made.exists():
            shutil.copy(made, result.with_suffix(".copying"))
            result.with_suffix(".copying").replace(result)
        self.steps[step.name] = {"state": state, "seconds": round(time.monotonic() - began, 1)}
        print(f"{step.name}: {state}", flush=True)


def _run(command: Sequence[str], log: Path, limit: float) -> str:
    """Run a command with its output in a file; what became of it."""
    with log.open("w", encoding="utf-8") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
            os.killpg(child.pid, signal.SIGKILL)  # with what it started
            child.wait()
            if isinstance(stop, KeyboardInterrupt):
                raise
            return "stopped: over its time"
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        return f"failed with {code}: {lines[-1][:200]}"
    return "done"


# ---------------------------------------------------------------------- the steps


def steps(options: argparse.Namespace, work: Path) -> Iterator[Step]:
    """All of them, the most worth first."""
    yield Step("gpu-tests", 2, lambda _, made: _tests(made), "xml")
    geometries = ["opt-125m"] if options.rehearse else ["opt-1.3b", "opt-6.7b"]
    batches = ["1", "2"] if options.rehearse else ["1", "32", "8", "128"]
    for geometry in geometries:
        for batch in batches:
            yield Step(
                f"bench-{geometry}-b{batch}", 1, lambda _, made, g=geometry, b=batch: _bench(options, g, b, made)
            )
    for task, definition in TASKS.items():
        data = options.data / task
        if (data / "train.jsonl").is_file():
            tuned = work / f"tuned-{task}"
            yield Step(
                f"tune-{task}", 4, lambda s, made, d=data, t=definition, o=tuned: _tune(options, s, t, d, o, made)
            )
            yield Step(f"eval-{task}", 2, lambda _, made, d=data, t=definition, o=tuned: _eval(options, t, d, o, made))


def _tests(made: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        str(HERE.parent / "tests" / "engine" / "test_gpu.py"),
        f"--junitxml={made}",
    ]


def _bench(options: argparse.Namespace, geometry: str, batch: str, made: Path) -> list[str]:
    engines = ["gated", "transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    size = ["--prompt", "4", "--new", "4", "--rounds", "1"] if options.rehearse else ["--prompt", "64", "--new", "128"]
    head = [sys.executable, str(HERE / "rivals.py"), "--geometry", geometry, "--batches", batch, *size]
    return [*head, "--nominal", "1", *SPEEDUPS, "--engines", *engines, "--out", str(made)]


def _tune(options: argparse.Namespace, seconds: float, task: str, data: Path, out: Path, made: Path) -> list[str]:
    """This script again: how many steps fit is measured first."""
    here = [
        sys.executable,
        __file__,
        "--tune",
        task,
        "--seconds",
        str(seconds),
        "--data",
        str(data),
        "--work",
        str(out),
    ]
    return [*here, "--model", options.model, "--out", str(made), *(["--rehearse"] if options.rehearse else [])]


def _eval(options: argparse.Namespace, task: str, data: Path, tuned: Path, made: Path) -> list[str]:
    here = [sys.executable, __file__, "--eval", task, "--data", str(data), "--work", str(tuned), "--out", str(made)]
    return [*here, *(["--rehearse"] if options.rehearse else [])]


# ---------------------------------------------------------------------- what children of this script do


def tune(options: argparse.Namespace) -> None:
    """Tune in all weights, for as many steps as the seconds allow; the recipe with its log is the result."""
    probe = options.work.with_name(f"{options.work.name}-probe")
    shutil.rmtree(probe, ignore_errors=True)
    _tuning(options, probe, 1 if options.rehearse else _PROBE_STEPS)
    took = json.loads((probe / "recipe.json").read_text(encoding="utf-8"))["result"]
    shutil.rmtree(probe)
    # The first steps are slow; loading and the dev records take a part.
    count = 2 if options.rehearse else max(20, round(0.7 * options.seconds * took["steps"] / took["seconds"]))
    _tuning(options, options.work, count)
    log = [json.loads(line) for line in (options.work / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    recipe = json.loads((options.work / "recipe.json").read_text(encoding="utf-8"))
    write_whole(options.out, json.dumps({"recipe": recipe, "log": log}) + "\n")


def _tuning(options: argparse.Namespace, out: Path, count: int) -> None:
    data = ["--train", options.data / "train.jsonl", "--dev", options.data / "dev.jsonl", "--dev-records", "128"]
    batch = ["--batch-size", "2", "--max-length", "64"] if options.rehearse else ["--batch-size", "64"]
    schedule = ["--schedule", options.work.with_name("even-2x.json")]
    save_even(Path(schedule[1]), options.model)
    speeds = ["--curriculum", "sampled", "--sampled-speedups", "1", "3", "5", "--distill-weight", "0.5"]
    pace = [
        "--steps",
        count,
        "--eval-every",
        max(1, count // 8),
        "--checkpoint-every",
        max(1, count),
        "--compare-batches",
        0,
    ]
    skip = ["--bad-records", "skip", "--learning-rate", "3e-4", "--full"]
    command = [
        *SKIPDECODE,
        "tune",
        options.model,
        "--task",
        options.tune,
        *data,
        *batch,
        *schedule,
        *speeds,
        *pace,
        *skip,
    ]
    subprocess.run(list(map(str, [*command, "--out", out])), check=True)


def save_even(path: Path, model: str) -> None:
    """The even order with the paper's depths at 2x, in the order that serves 5x too."""
    from dataclasses import replace

    from skipdecode import Schedule
    from skipdecode.models.families import layers_in
    from skipdecode.models.loading.ref import ModelRef

    layers, positions = layers_in(ModelRef(model).config), 64
    order = Schedule.published("even", layers, 5, positions).drop_order
    schedule = replace(Schedule.from_speedup(layers, 2, positions), drop_order=order, name="even-2x")
    write_whole(path, schedule.to_json() + "\n")


def evaluate(options: argparse.Namespace) -> None:
    """The tuned checkpoint at every depth; the runs' documents, without their texts, are the result."""
    from skipdecode import Schedule

    target = Schedule.load(options.work.with_name("even-2x.json"))
    names = []
    for speedup in SPEEDUPS:
        place = options.work.with_name(f"even-{speedup}x.json")
        write_whole(place, target.with_speedup(float(speedup)).to_json() + "\n")
        names.append(str(place))
    out = options.work.with_name(f"{options.work.name}-eval")
    size = ["--limit", "2", "--max-new-tokens", "4"] if options.rehearse else ["--limit", "1000", "--batch-size", "128"]
    metrics = ["--metrics", "bleu", "rougeL", "--bad-records", "skip", "--overwrite"]
    data = ["--task", options.eval, "--data", options.data / "test.jsonl"]
    command = [*SKIPDECODE, "eval", options.work, *data, "--methods", *names, *size, *metrics, "--out", out]
    subprocess.run(list(map(str, command)), check=True)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*/run.json"))]
    write_whole(options.out, json.dumps({"runs": [run | {"samples": run["samples"][:2]} for run in runs]}) + "\n")


def rehearsal_data(place: Path) -> Path:
    """A folder of E2E with records that are made up here."""
    rows = [{"mr": f"name[Inn {i}], food[soup]", "ref": f"Inn {i} has soup."} for i in range(4)]
    for name in ("train", "dev", "test"):
        write_whole(place / "e2e" / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folders e2e, cnn_dm, tldr")
    parser.add_argument("--model", default="smollm2-135m", help="what is tuned: a directory, or a name")
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--work", type=Path, help="directory for weights (default: a new one among temporary files)")
    parser.add_argument("--rehearse", action="store_true", help="all steps with tiny sizes, on a CPU too")
    for child in ("--tune", "--eval", "--seconds"):
        parser.add_argument(child, type=float if child == "--seconds" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    child = next((run for name, run in _CHILDREN.items() if getattr(options, name)), None)
    if child is not None:
        child(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    running = Round(options)
    if options.rehearse:
        options.data = rehearsal_data(running.work / "data")
    running.run(list(steps(options, running.work)))
    print(f"results: {options.out}; weights: {running.work}")


_CHILDREN = {"tune": tune, "eval": evaluate}

if __name__ == "__main__":
    main()
