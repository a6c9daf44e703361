"""The runs behind the chat table: a model tuned for skipping on self-generated data, and its quality at each depth.

    python benchmarks/chat_runs.py --runs runs
    python benchmarks/chat_runs.py --runs runs --checkpoint chat-smollm2-135m --schedules a.json b.json

Four commands: `tune --self` for a single step, which has the model draw prompts and answer them; `bundled_fit.py` on
these words, for the fit of presets/fit-chat-smollm2-135m.json; `tune --self` again, on the same words under the
schedules of this fit; and `eval` without references twice, on prompts drawn anew and on `tasks/chat_prompts.txt`. Then
requests of the lengths of these texts are timed one at a time. What is finished is left alone. On two cores about an
hour and a half, evaluation and times a quarter of an hour of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared import RESULTS, TASKS, call, is_tuned, script_parser, write_json

from skipdecode import Schedule
from skipdecode.common.jsonl import read_result
from skipdecode.common.progress import note
from skipdecode.engine.opening import load, open_engines
from skipdecode.evaluation.methods import ROUNDS, Method, speed_entries, time_equal_lengths
from skipdecode.evaluation.results import EvaluationSettings

MODEL = "smollm2-135m"
FIT = Path(__file__).parents[1] / "presets/fit-chat-smollm2-135m.json"
TARGET = "chat-1.3x.json"
WORDS = ("--self", "--self-records", "1200", "--self-tokens", "96", "--self-temperature", "0", "--dev-records", "128")
PACE = ("--batch-size", "4", "--learning-rate", "1e-3", "--lora-rank", "6", "--adapter-dtype", "float16")
PAUSES = ("--eval-every", "200", "--checkpoint-every", "50")
SAMPLED = ("--sampled-speedups", "1", "1.3", "1.3", "1.3", "1.5", "1.5")
DEPTHS = (1.2, 1.3, 1.4, 1.5)
TIMED = 16


def tuned(runs: Path) -> Path:
    """The checkpoint, made where it is not there."""
    words, fit, out = runs / "chat-answers", runs / "chat-fit", runs / "chat-self"
    if is_tuned(out):
        return out
    tune = ["skipdecode", "tune", MODEL, *WORDS, *PACE, *PAUSES]
    if not is_tuned(words):
        call(*tune, "--steps", "1", "--out", words)
    if not (fit / TARGET).exists():
        script = Path(__file__).with_name("bundled_fit.py")
        call(sys.executable, script, "--words", words, "--preset", FIT, "--out", fit)
    out.mkdir(exist_ok=True)
    for file in ("self.json", "self.jsonl", "self-dev.jsonl"):  # it goes on with these words
        shutil.copy(words / file, out)
    call(*tune, *SAMPLED, "--schedule", fit / TARGET, "--steps", "800", "--out", out)
    return out


def depths(checkpoint: str, runs: Path) -> list[Path]:
    """Schedule files of what the checkpoint was tuned under, and of what lies between."""
    carried = load(checkpoint).schedule
    if carried is None:
        raise SystemExit(f"chat_runs: {checkpoint} carries no schedule: give --schedules")
    files = []
    for speedup in DEPTHS:
        one = carried.with_speedup(speedup)
        files.append(runs / f"{one.name}.json")
        one.save(files[-1])
    return files


def evaluated(checkpoint: str, schedules: Sequence[Path], out: Path, *more: str | Path) -> dict[str, Any]:
    """What `eval` without references finds."""
    if not (out / "run.json").exists():
        asked = ["--max-new-tokens", "128", *more, "--out", out, "--methods", *schedules]
        call("skipdecode", "eval", checkpoint, *asked)
    return read_result(out / "run.json", "self-generated")


def alone(checkpoint: str, schedules: Sequence[Path], texts: Path) -> dict[str, dict[str, Any]]:
    """Speed-ups of requests one at a time, by the schedule's name, for lengths of the base model's texts."""
    loaded = load(checkpoint)
    tokenizer: Any = loaded.tokenizer
    with texts.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(TIMED), lines, strict=False)]
    turns = ([{"role": "user", "content": row["prompt"]}] for row in rows)
    prompts = [tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=True).input_ids for t in turns]
    lengths = [max(2, len(tokenizer(row["texts"]["base"]).input_ids)) for row in rows]
    source = open_engines(loaded.model, "fast", note)
    methods = [Method(source), *(Method(source, Schedule.load(str(file))) for file in schedules)]
    turns = time_equal_lengths(methods, prompts, lengths, batch_size=1)
    return {m.name: speed_entries(turns, m, methods[0], EvaluationSettings(), {}) for m in methods[1:]}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; returns the exit code of the first command that fails, or 0."""
    parser = script_parser(__doc__, default=RESULTS / "chat-smollm2-135m.json")
    parser.add_argument("--runs", type=Path, required=True, help="directory for checkpoints and evaluations")
    parser.add_argument("--checkpoint", help="evaluate this one (default: made here)")
    parser.add_argument("--schedules", type=Path, nargs="+", help="of the checkpoint (default: its own at four depths)")
    parser.add_argument("--records", type=int, default=64, help="prompts to draw for the evaluation (default: 64)")
    options = parser.parse_args(argv)
    runs: Path = options.runs
    runs.mkdir(parents=True, exist_ok=True)
    try:
        checkpoint = options.checkpoint or str(tuned(runs))
        schedules = options.schedules or depths(checkpoint, runs)
        place = runs / f"eval-{Path(checkpoint).name}"
        drawn = evaluated(checkpoint, schedules, place, "--limit", str(options.records))
        theirs = evaluated(checkpoint, schedules, Path(f"{place}-prompts"), "--prompts", TASKS / "chat_prompts.txt")
    except subprocess.CalledProcessError as e:
        return int(e.returncode)
    speeds = alone(checkpoint, schedules, place / "outputs.jsonl")
    for row in drawn["rows"]:
        if row["name"] in speeds:
            row["batch_1"] = speeds[row["name"]]
    files = [json.loads(file.read_text(encoding="utf-8")) for file in schedules]
    recipe = Path(checkpoint) / "recipe.json"
    more = {
        "schedules": files,
        "recipe": json.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else None,
        "batch_1": {"records": TIMED, "rounds": ROUNDS},
        "other_prompts": {"file": "benchmarks/tasks/chat_prompts.txt", "n": theirs["n"], "rows": theirs["rows"]},
    }
    write_json(options.out, drawn | more)
    return 0


if __name__ == "__main__":
    sys.exit(main())
