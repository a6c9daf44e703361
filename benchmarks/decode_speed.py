"""Decode-phase time of the transformers path under schedules, next to nominal and the cost model's prediction.

One process, one model, alternating rounds: full depth, then each nominal speed-up, then again. The prompt is run once
and its cache copied, so that only decoding is timed. Weights are random: a step takes the
same time whatever they are.

    python benchmarks/decode_speed.py --geometry opt-1.3b --batch 8 --out results/decode-opt-1.3b-cpu.json
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from typing import Any

import torch
from shared import script_parser, write_result
from tqdm import tqdm

from skipdecode import Schedule, attach
from skipdecode.common.stopwatch import Stopwatch
from skipdecode.engine.opening import Backend
from skipdecode.performance.bench.workload import GEOMETRIES, build
from skipdecode.performance.measure import measure_cost


@torch.inference_mode()
def decode_seconds(model: Any, cache: Any, token: torch.Tensor, new_tokens: int) -> tuple[float, Any]:
    """Seconds of the `new_tokens` - 1 steps after the prompt, greedy; and the cache they filled."""
    cache = copy.deepcopy(cache)
    start = time.perf_counter()
    for _ in range(new_tokens - 1):
        logits = model(input_ids=token, past_key_values=cache).logits
        token = logits[:, -1:].argmax(-1)
    return time.perf_counter() - start, cache


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; returns what was found."""
    model = build(options.geometry, getattr(torch, options.dtype))
    layers = model.config.num_hidden_layers
    cost = measure_cost(Backend(model), batch=options.batch, prompt_len=options.prompt, progress=True)
    schedules = {1.0: Schedule.full(layers)}
    schedules |= {s: Schedule.from_speedup(layers, s, options.new) for s in options.nominal}
    watch = Stopwatch[float, float](schedules)
    held: dict[float, tuple[int, int]] = {}
    prompt = torch.randint(5, 1000, (options.batch, options.prompt))
    with attach(model, schedules[1.0]) as attachment:
        cache = attachment.new_cache()
        with torch.inference_mode():
            logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        bar = tqdm(total=options.rounds * len(schedules), unit="run")

        def lap(speedup: float) -> float:
            attachment.schedule = schedules[speedup]
            taken, filled = decode_seconds(model, cache, token, options.new)
            held[speedup] = (filled.kv_bytes(), filled.kv_bytes_full())
            bar.update()
            return taken

        for _ in range(options.rounds):
            watch.lap(lap)
        bar.close()
    rows = []
    for speedup, schedule in schedules.items():
        predicted = cost.speedup(schedule, options.prompt, options.new)
        measured = watch.ratio(1.0, speedup, float) or 0.0
        rows.append(
            {
                "engine": "transformers",
                "batch": options.batch,
                "nominal_speedup": speedup,
                "mean_layers": schedule.mean_budget(options.new - 1),
                "decode_tokens_per_s": options.batch * (options.new - 1) / watch.seconds(speedup, float),
                "decode_speedup": measured,
                "predicted_speedup": predicted,
                "measured_over_predicted": measured / predicted,
                "seconds": watch.laps(speedup),
                "kv_bytes": held[speedup][0],
                "kv_bytes_full": held[speedup][1],
            }
        )
    return {"cost_model": cost.to_dict(), "rows": rows}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="opt-1.3b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens of a row")
    parser.add_argument("--new", type=int, default=96, help="generated tokens of a row")
    parser.add_argument("--nominal", type=float, nargs="+", default=[2.0, 3.0, 5.0], help="nominal speed-ups")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; medians count")
    options = parser.parse_args()
    found = run(options)
    write_result(options.out, "decode-speed", found, options)
    for row in found["rows"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
