"""The vLLM plugin next to stock vLLM, on a CPU, in one process, in turns; run it in the plugin's own environment.

Both engines run in this process, so whatever else the machine does meets both alike. Each part adds its ratio and its
runs to the result file, so that parts can be measured one at a time:

    VLLM_ENV=~/.cache/skipdecode/vllm-env
    for part in full_depth_overhead lockstep_8_nominal_2x mixed_32_linear_2x poisson_flat_2x; do
      $VLLM_ENV/bin/python benchmarks/vllm_speed.py --part $part --model DIR --out results/vllm-cpu.json; done

These run both engines eagerly. `--part default` runs them as vLLM does by default, compiled; it starts each once, with
32 slots, and measures all ratios whose names begin with `default_` (or one: `--part default_poisson_flat_2x`).

Ratios are stock's time over the plugin's, medians of alternating rounds, but for `full_depth_overhead`: the plugin's
time at full depth over stock's, less 1. `poisson_flat_2x` is a ratio of rates: the highest at which the plugin's p99
inter-token latency is no longer than stock's at 80% of stock's capacity, over that rate. `default_split_requests`: 32
requests at once, prompts of 192 tokens and 60 new ones, under a split schedule (prompts run the lower half of the
layers, generated tokens as many of the upper ones).
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

from shared import config_of, script_parser, write_result

from skipdecode import Schedule
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import read_result

PARTS = ("full_depth_overhead", "lockstep_8_nominal_2x", "mixed_32_linear_2x", "poisson_flat_2x")
DEFAULT_PARTS = (
    "default_full_depth_overhead",
    "default_lockstep_8_flat_2x",
    "default_mixed_32_linear_2x",
    "default_split_requests",
    "default_poisson_flat_2x",
)
SLOTS = {"full_depth_overhead": 8, "lockstep_8_nominal_2x": 8}  # others: 32
PROMPT, NEW, LONG_PROMPT, LONG_NEW = 32, 64, 192, 60


class Load:
    """An engine and the clock of what it gives."""

    def __init__(self, options: argparse.Namespace, *schedules: Schedule) -> None:
        from vllm import LLM

        first, *others = [schedule.to_dict() for schedule in schedules] or [None]
        overrides = {} if first is None else {"skipdecode": first}
        self.engine = LLM(
            options.model,
            dtype=options.dtype,
            max_model_len=512,
            max_num_seqs=SLOTS.get(options.part, 32),
            block_size=32,
            skip_tokenizer_init=True,
            enforce_eager=not options.part.startswith("default"),
            enable_prefix_caching=False,
            hf_overrides=overrides,
            additional_config={"skipdecode": {"schedules": others}} if others else {},
        ).llm_engine
        self._asked = 0

    def run(self, requests: list[tuple[float, int]], name: str | None = None, prompt: int = PROMPT) -> dict[str, Any]:
        """Serve requests (arrival in seconds, new tokens); returns seconds, tokens, waits for the first and gaps."""
        from vllm import SamplingParams

        waiting = [(arrival, number, new) for number, (arrival, new) in enumerate(requests)]
        heapq.heapify(waiting)
        extra = None if name is None else {"skipdecode": name}
        last: dict[str, tuple[float, int]] = {}
        gaps: list[float] = []
        waits: list[float] = []
        asked_at: dict[str, float] = {}
        began = time.perf_counter()
        first_all = tokens = 0.0
        while waiting or self.engine.has_unfinished_requests():
            now = time.perf_counter() - began
            while waiting and waiting[0][0] <= now:
                arrival, number, new = heapq.heappop(waiting)
                self._asked += 1
                asked_at[str(self._asked)] = arrival
                ids = [5 + (number * 31 + i * 7) % 40000 for i in range(prompt)]
                sampling = SamplingParams(
                    temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, extra_args=extra
                )
                self.engine.add_request(str(self._asked), {"prompt_token_ids": ids}, sampling)
            if not self.engine.has_unfinished_requests():
                time.sleep(min(0.001, waiting[0][0] - now))
                continue
            for output in self.engine.step():
                at, count = time.perf_counter() - began, len(output.outputs[0].token_ids)
                before = last.get(output.request_id)
                if before is None:
                    waits.append(at - asked_at[output.request_id])
                if before is not None and count > before[1]:
                    gaps.append(at - before[0])
                last[output.request_id] = (at, count)
            if not first_all and len(last) == len(requests):
                first_all, tokens = time.perf_counter() - began, sum(c for _, c in last.values())
        seconds = time.perf_counter() - began
        total = sum(c for _, c in last.values())
        decode = (seconds - first_all) / max(1, total - tokens)
        return {"seconds": seconds, "tokens": total, "decode_s_per_token": decode, "gaps": gaps, "waits": waits}


def alternate(
    options: argparse.Namespace, stock: Load, ours: Load, requests: Any, name: str, prompt: int
) -> dict[str, Any]:
    """Seconds a generated token (decode phase for rows that start together), stock and a schedule in turns."""
    together = all(arrival == 0 for arrival, _ in requests) and len(requests) <= 8
    found: dict[str, list[dict[str, Any]]] = {"stock": [], name: []}
    for number in range(options.rounds + 1):
        for side, runs in found.items():
            done = stock.run(requests, prompt=prompt) if side == "stock" else ours.run(requests, name, prompt)
            if number:  # The first round warms up.
                runs.append(done)
    return {side: summary(runs, together) for side, runs in found.items()}


def summary(runs: list[dict[str, Any]], decode_only: bool = False) -> dict[str, Any]:
    """What a result keeps of some runs."""
    values = [r["decode_s_per_token"] if decode_only else r["seconds"] / r["tokens"] for r in runs]
    spread = {
        f"{name}_s": [statistics.median(percentile(share, r[name]) for r in runs) for share in (0.5, 0.99)]
        for name in ("waits", "gaps")
    }
    return {"s_per_token": values, "median": statistics.median(values), **spread}


def poisson(count: int, rate: float, seed: int) -> list[tuple[float, int]]:
    """Arrivals at random, outputs of 16 to 96 tokens."""
    random_ = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += random_.expovariate(rate)
        requests.append((at, random_.randint(16, 96)))
    return requests


def percentile(share: float, values: list[float]) -> float:
    """A percentile."""
    return sorted(values)[int(share * (len(values) - 1))]


def sustainable(options: argparse.Namespace, stock: Load, ours: Load, flat: str) -> tuple[float, dict[str, Any]]:
    """How much more load the flat schedule carries at stock's p99 inter-token latency."""
    burst = [(0.0, new) for _, new in poisson(options.requests, 1.0, 0)]
    stock.run(burst[:32])
    capacity = len(burst) / stock.run(burst)["seconds"]
    rate = 0.8 * capacity
    stocks = [stock.run(poisson(options.requests, rate, s)) for s in range(options.rounds)]
    limit = statistics.median(percentile(0.99, run["gaps"]) for run in stocks)
    tried, best = [], 0.0
    low, high = 0.5, 2.5
    for _ in range(options.bisections):
        factor = (low + high) / 2
        runs = [ours.run(poisson(options.requests, rate * factor, s), flat) for s in range(options.rounds)]
        reached = statistics.median(percentile(0.99, r["gaps"]) for r in runs)
        # A rate that is not carried shows in the queue, not between tokens: the end comes long after the last arrival.
        ends = [poisson(options.requests, rate * factor, s)[-1][0] for s in range(options.rounds)]
        kept_up = all(r["seconds"] <= 1.1 * end + 96 * limit for r, end in zip(runs, ends, strict=True))
        waits = summary(runs)["waits_s"]
        tried.append({"factor": factor, "p99_s": reached, "kept_up": kept_up, "waits_s": waits})
        if reached <= limit and kept_up:
            best, low = factor, factor
        else:
            high = factor
    found = {"capacity_requests_per_s": capacity, "rate": rate, "stock_p99_s": limit, "tried": tried}
    return best, found | {"stock_waits_s": summary(stocks)["waits_s"]}


def measure(options: argparse.Namespace) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """The name of each part, its ratio and what the ratio comes from."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(options.model).num_hidden_layers
    half = round(layers / 2)
    linear = Schedule.from_speedup(layers, 2.0, NEW, name="linear")
    flat = Schedule.constant(layers, half, name="flat")
    split = Schedule.split(layers, half, half, name="split")
    stock, ours = (
        Load(options),
        Load(options, *((flat, linear, split) if options.part.startswith("default") else (flat, linear))),
    )
    for part in DEFAULT_PARTS if options.part == "default" else (options.part,):
        yield part, *compared(options, part.removeprefix("default_"), stock, ours)


def compared(options: argparse.Namespace, part: str, stock: Load, ours: Load) -> tuple[float, dict[str, Any]]:
    """The ratio of a part, and its runs."""
    if part == "poisson_flat_2x":
        return sustainable(options, stock, ours, "flat")
    mixed = [(0.0, new) for _, new in poisson(options.requests, 1.0, 0)]
    name, requests, prompt = {
        "full_depth_overhead": ("full", [(0.0, NEW)] * 8, PROMPT),
        "lockstep_8_flat_2x": ("flat", [(0.0, NEW)] * 8, PROMPT),
        "lockstep_8_nominal_2x": ("linear", [(0.0, NEW)] * 8, PROMPT),
        "mixed_32_linear_2x": ("linear", mixed, PROMPT),
        "split_requests": ("split", [(0.0, LONG_NEW)] * 32, LONG_PROMPT),
    }[part]
    runs = alternate(options, stock, ours, requests, name, prompt)
    ratio = runs["stock"]["median"] / runs[name]["median"]
    return 1 / ratio - 1 if name == "full" else ratio, runs


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--part", choices=(*PARTS, "default", *DEFAULT_PARTS), required=True)
    parser.add_argument("--model", required=True, help="checkpoint directory")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds; medians count")
    parser.add_argument("--requests", type=int, default=96, help="of the mixed and the Poisson load")
    parser.add_argument("--bisections", type=int, default=4, help="rates tried for the Poisson load")
    options = parser.parse_args()
    for part, ratio, run in measure(options):
        before = read_result(options.out, "benchmark") if options.out.is_file() else {"ratios": {}, "runs": []}
        config = config_of(options) | {"part": part}
        runs = [r for r in before["runs"] if r["part"] != part]
        runs.append({"part": part, "config": config, "environment": environment(), "result": run})
        write_result(options.out, "vllm-speed", {"ratios": before["ratios"] | {part: ratio}, "runs": runs})
        print(f"{part}: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
