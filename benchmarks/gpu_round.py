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
into `--out` when its step is done; weights stay in `--work`. A second call with the same `--out` does what is not done
yet. `--rehearse` goes through all steps on a CPU with tiny sizes, in two minutes or so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared import TASKS, script_parser, write_json

from skipdecode import Schedule
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.models.families import layers_in
from skipdecode.models.loading.ref import ModelRef

HERE = Path(__file__).parent
SKIPDECODE = [sys.executable, "-m", "skipdecode.cli"]
SPEEDUPS = (2, 3, 5)
DEFINITIONS = {"e2e": "e2e", "cnn_dm": TASKS / "cnn_dm.yaml", "tldr": TASKS / "tldr.yaml"}
_POSITIONS = 64
_LEAST_SECONDS = 20

Command = Sequence[str | Path]


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
        From the seconds of the step to its command.
    result : callable
        The text of the result, after the command.
    """

    name: str
    share: float
    command: Callable[[float], Command]
    result: Callable[[], str]
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
        settings = {k: str(v) for k, v in vars(self.options).items() if v is not None}
        shares = sum(step.share for step in steps)
        for step in steps:
            left = self.end - time.monotonic()
            self.steps[step.name] = self._one(step, left, left * step.share / shares)
            shares -= step.share
            document = {"environment": environment(), "options": settings, "steps": self.steps}
            write_json(self.out / "round.json", document)

    def _one(self, step: Step, left: float, seconds: float) -> dict[str, object]:
        """Run a step; returns what became of it."""
        result, began = self.out / f"{step.name}.{step.suffix}", time.monotonic()
        if result.exists():
            return {"state": "done before"}
        if left < _LEAST_SECONDS:
            return {"state": "skipped: no time was left"}
        print(f"{step.name}: {seconds:.0f} s, {left:.0f} s are left in all", flush=True)
        # It may take from those after it: they are worth less.
        state = _run(step.command(seconds), self.out / f"{step.name}.log", min(left, 2 * seconds))
        if state == "done":
            write_whole(result, step.result())
        print(f"{step.name}: {state}", flush=True)
        return {"state": state, "seconds": round(time.monotonic() - began, 1)}


def _run(command: Command, log: Path, limit: float) -> str:
    """Run a command with its output in a file; what became of it."""
    with log.open("w", encoding="utf-8") as file:
        words = list(map(str, command))
        child = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
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
    yield _tests(work / "gpu-tests.xml")
    geometries = ["opt-125m"] if options.rehearse else ["opt-1.3b", "opt-6.7b"]
    batches = ["1", "2"] if options.rehearse else ["1", "32", "8", "128"]
    for geometry in geometries:
        for batch in batches:
            yield _bench(options, geometry, batch, work / f"bench-{geometry}-b{batch}.json")
    schedules = saved_schedules(options.model, work)
    for task in DEFINITIONS:
        if (options.data / task / "train.jsonl").is_file():
            yield _tune(options, task, schedules[0], work / f"tuned-{task}")
            yield _eval(options, task, schedules, work / f"tuned-{task}", work / f"eval-{task}")


def saved_schedules(model: str, work: Path) -> list[Path]:
    """Files of the even order with the paper's depths, one for each speed-up."""
    layers, files = layers_in(ModelRef(model).config), []
    order = Schedule.from_speedup(layers, SPEEDUPS[-1], _POSITIONS).reordered("even").drop_order
    for speedup in SPEEDUPS:
        files.append(work / f"even-{speedup}x.json")
        linear = Schedule.from_speedup(layers, speedup, _POSITIONS)
        write_whole(files[-1], replace(linear, drop_order=order, name=files[-1].stem).to_json() + "\n")
    return files


def _tests(made: Path) -> Step:
    tests = HERE.parent / "tests" / "engine" / "test_gpu.py"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", tests, f"--junitxml={made}"]
    return Step("gpu-tests", 2, lambda _: command, made.read_text, "xml")


def _bench(options: argparse.Namespace, geometry: str, batch: str, made: Path) -> Step:
    engines = ["gated", "transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    size = ["--prompt", "4", "--new", "4", "--rounds", "1"] if options.rehearse else ["--prompt", "64", "--new", "128"]
    head = [sys.executable, HERE / "speed.py", "--geometry", geometry, "--batches", batch, *size]
    command = [*head, "--nominal", "1", *map(str, SPEEDUPS), "--engines", *engines, "--out", made]
    return Step(made.stem, 1, lambda _: command, made.read_text)


def _tune(options: argparse.Namespace, task: str, schedule: Path, out: Path) -> Step:
    """All weights, for the minutes of the step; the recipe with its log is the result."""
    data = options.data / task
    files = ["--train", data / "train.jsonl", "--dev", data / "dev.jsonl", "--dev-records", "128", "--out", out]
    batch = ["--batch-size", "2", "--max-length", "64"] if options.rehearse else ["--batch-size", "64"]
    speeds = ["--curriculum", "sampled", "--sampled-speedups", "1", "3", "5", "--distill-weight", "0.5"]
    rest = ["--bad-records", "skip", "--learning-rate", "3e-4", "--compare-batches", "0", "--full"]
    head = [*SKIPDECODE, "tune", options.model, "--task", DEFINITIONS[task], *files, *batch, "--schedule", schedule]

    def command(seconds: float) -> Command:
        # Loading and the dev records take a part.
        pace = ["--steps", "2"] if options.rehearse else ["--minutes", f"{0.7 * seconds / 60:.2f}"]
        return [*head, *speeds, *rest, *pace]

    def result() -> str:
        log = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        return json.dumps({"recipe": json.loads((out / "recipe.json").read_text(encoding="utf-8")), "log": log}) + "\n"

    return Step(f"tune-{task}", 4, command, result)


def _eval(options: argparse.Namespace, task: str, schedules: Sequence[Path], tuned: Path, out: Path) -> Step:
    """The tuned checkpoint at every depth; the runs' documents, without their texts, are the result."""
    size = ["--limit", "2", "--max-new-tokens", "4"] if options.rehearse else ["--limit", "1000", "--batch-size", "128"]
    metrics = ["--metrics", "bleu", "rougeL", "--bad-records", "skip", "--overwrite"]
    data = ["--task", DEFINITIONS[task], "--data", options.data / task / "test.jsonl"]
    command = [*SKIPDECODE, "eval", tuned, *data, "--methods", *schedules, *size, *metrics, "--out", out]

    def result() -> str:
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(out.glob("*/run.json"))]
        return json.dumps({"runs": [run | {"samples": run["samples"][:2]} for run in runs]}) + "\n"

    return Step(f"eval-{task}", 2, lambda _: command, result)


def rehearsal_data(place: Path) -> Path:
    """A folder of E2E with records that are made up here."""
    rows = [{"mr": f"name[Inn {i}], food[soup]", "ref": f"Inn {i} has soup."} for i in range(4)]
    for name in ("train", "dev", "test"):
        write_whole(place / "e2e" / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return place


def main() -> None:
    parser = script_parser(__doc__, result="directory for the results")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folders e2e, cnn_dm, tldr")
    parser.add_argument("--model", default="smollm2-135m", help="what is tuned: a directory, or a name")
    parser.add_argument("--work", type=Path, help="directory for weights (default: a new one among temporary files)")
    parser.add_argument("--rehearse", action="store_true", help="all steps with tiny sizes, on a CPU too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    running = Round(options)
    if options.rehearse:
        options.data = rehearsal_data(running.work / "data")
    running.run(list(steps(options, running.work)))
    print(f"results: {options.out}; weights: {running.work}")


if __name__ == "__main__":
    main()
