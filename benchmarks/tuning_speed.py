"""Training tokens per second under schedules next to full depth: whole optimizer steps on response-heavy batches.

One process, one model, alternating rounds. Weights and tokens are random: a step takes the same time whatever they are.

    python benchmarks/tuning_speed.py --geometry smollm2-135m --out results/tuning-speed-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from skipdecode import Schedule, attach
from skipdecode.common.allocator import keep_freed_memory
from skipdecode.common.environment import environment
from skipdecode.common.kinds import heading
from skipdecode.common.stopwatch import Stopwatch, timed
from skipdecode.data.prompts import Example
from skipdecode.performance.bench.workload import GEOMETRIES, build
from skipdecode.tuning.collate import collate
from skipdecode.tuning.config import TuneConfig
from skipdecode.tuning.objective import KeptTeacher, Objective, Teacher
from skipdecode.tuning.setup import add_lora, make_accelerator, make_optimizer
from skipdecode.tuning.step import TrainStep


def measure(full: bool, teacher: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one way of tuning: all weights, or a LoRA adapter; on texts, or by full depth, asked or kept."""
    model = build(options.geometry, torch.float32)
    layers = model.config.num_hidden_layers
    schedules = {1.0: Schedule.full(layers)}
    schedules |= {s: Schedule.from_speedup(layers, s, options.response) for s in options.nominal}
    config = TuneConfig(full=full, precision=options.precision)
    accelerator = make_accelerator(config, schedules[1.0])
    trained = model if full else add_lora(model, config)
    attachment = attach(trained, schedules[1.0])
    trained, optimizer = accelerator.prepare(trained, make_optimizer(trained, config))
    trained.train()
    asked = Teacher(attachment, trained, adapter=None if full else trained)
    said = {"none": None, "asked": asked, "kept": KeptTeacher(asked, config.teacher_words)}[teacher]
    step = TrainStep(accelerator, trained, optimizer, Objective(said, 1.0), config.clip)
    draw = random.Random(0)
    examples = [
        Example(str(i), *(tuple(draw.randrange(5, 1000) for _ in range(n)) for n in (options.prompt, options.response)))
        for i in range(options.batch)
    ]
    batch = collate(examples, 0).to(accelerator.device)
    watch = Stopwatch[float, float](schedules)
    bar = tqdm(total=(options.rounds + 1) * len(schedules), unit="step", desc="full" if full else "lora")

    def lap(speedup: float) -> float:
        attachment.schedule = schedules[speedup]
        bar.update()
        return timed(lambda: step([batch], config.learning_rate))

    for speedup in schedules:
        lap(speedup)
    for _ in range(options.rounds):
        watch.lap(lap)
    bar.close()
    attachment.detach()
    return [
        {
            "weights": "all" if full else "lora",
            "teacher": teacher,
            "nominal_speedup": speedup,
            "tokens_per_s": batch.tokens / watch.seconds(speedup, float),
            "speedup": watch.ratio(1.0, speedup, float),
            "seconds": watch.laps(speedup),
        }
        for speedup in schedules
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="smollm2-135m")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--batch", type=int, default=16, help="rows")
    parser.add_argument("--prompt", type=int, default=16, help="prompt tokens of a row")
    parser.add_argument("--response", type=int, default=96, help="response tokens of a row")
    parser.add_argument("--nominal", type=float, nargs="+", default=[2.0, 3.0, 5.0], help="nominal speed-ups")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds; medians count")
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    options = parser.parse_args()
    keep_freed_memory()
    ways = [(full, "none") for full in (True, False)] + [(False, teacher) for teacher in ("asked", "kept")]
    rows = [row for way in ways for row in measure(*way, options)]
    config = {k: v for k, v in vars(options).items() if k != "out"} | {"command": " ".join(["python", *sys.argv])}
    document = {
        **heading("benchmark", "tuning-speed"),
        "environment": environment(),
        "config": config,
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        speeds = f"{row['tokens_per_s']:7.0f} tokens/s {row['speedup']:.2f}x"
        print(f"{row['weights']:5} {row['teacher']:5} {row['nominal_speedup']:4.1f}x {speeds}")


if __name__ == "__main__":
    main()
