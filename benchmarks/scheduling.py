"""A batch job and a stream on the real engine, against the lockstep ideal and against what the simulator says.

Figures go into one JSON, part by part. The cost of a step is calibrated right before and after every run, in the same
process, from forwards on invented tokens; the simulator gets that and the lengths that came out, nothing else. Parts:

batch       512 prompts as a batch job, natural output lengths, at full depth and under the schedule. *Ideal*: all
            prompt tokens at the rate of a full prompts' forward, all decode steps with every row in use at the cost of
            the depth of the token's position. Share of the ideal = its seconds / the real ones.
stream      Requests one by one. *Capacity*: requests/s when all wait at once, median of alternating rounds. Then
            Poisson arrivals at a share of full depth's capacity, and for the flat schedule also at that share of its
            own. Output lengths are those of full depth for both, so that both do the same work.

    python benchmarks/scheduling.py batch --data test.jsonl dev.jsonl --out results/scheduling-smollm2-135m-cpu.json
    python benchmarks/scheduling.py stream --data test.jsonl dev.jsonl --out results/scheduling-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from shared import config_of, e2e_prompts, script_parser, write_result

from skipdecode import Schedule
from skipdecode.common.environment import environment
from skipdecode.common.kinds import read_result
from skipdecode.common.progress import note
from skipdecode.data.tasks import load_task
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.opening import Backend, end_tokens, open_fast
from skipdecode.models.families import unwrap
from skipdecode.models.loading.hub import load_model
from skipdecode.performance.cost import CostModel
from skipdecode.performance.measure import CostMeter
from skipdecode.performance.simulation import POLICIES, Simulation, simulate, spread
from skipdecode.performance.traces import Arrival, bursts

_ROWS = (1, 2, 4, 8, 12, 16, 24)  # of the steps that are timed
_PROMPTS = (16, 64, 128, 256, 512)  # tokens of the prompts' forwards that are timed


class Job(NamedTuple):
    """What is run."""

    loaded: Any  # the transformers model behind it
    schedule: Schedule  # that it carries
    model: FastModel
    prompts: list[list[int]]
    ends: frozenset[int]
    limit: int


def load(options: argparse.Namespace) -> Job:
    """The model on its fast path, and prompts of E2E."""
    loaded = load_model(options.model, dtype=options.dtype)
    prompts = [prompt for file in options.data for prompt in e2e_prompts(file, loaded.tokenizer)][: options.requests]
    fast = open_fast(loaded.model, "fast", note)
    if fast is None:
        raise SystemExit("the fast engine does not cover this model")
    ends = frozenset(end_tokens(loaded.model, loaded.tokenizer))
    return Job(unwrap(loaded.model), loaded.schedule, fast, prompts, ends, load_task("e2e").max_new_tokens)


# ---------------------------------------------------------------------- real runs


class Times(NamedTuple):
    """What a run gave: tokens of each request, and when each token came."""

    tokens: list[list[int]]
    seconds: list[list[float]]


def run_stream(engine: FastEngine, requests: Sequence[Request], arrivals: Sequence[float]) -> Times:
    """Submit each request when its time comes."""
    times = Times([[] for _ in requests], [[] for _ in requests])
    start, sent = time.perf_counter(), 0
    while sent < len(requests) or engine.has_work:
        now = time.perf_counter() - start
        due = sent
        while due < len(requests) and arrivals[due] <= now:
            due += 1
        engine.submit(requests[sent:due])
        sent = due
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[sent] - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            times.tokens[output.request].append(output.token)
            times.seconds[output.request].append(now)
    return times


def calibrated(
    job: Job, engine: FastEngine, requests: Sequence[Request], arrivals: Sequence[float], rows: int
) -> tuple[Times, CostModel]:
    """A run, and what steps cost around it."""
    counts = {n for n in (*_ROWS, *range(32, rows, 16)) if n < rows} | {rows}
    meter = CostMeter(Backend(job.loaded, engine.model), rows=counts, prompt_len=32, prompts=_PROMPTS)
    meter.run(2)
    times = run_stream(engine, requests, arrivals)
    meter.run(2)
    return times, meter.cost()


def figures(times: Times, arrivals: Sequence[float], engine: FastEngine) -> dict[str, Any]:
    """Throughput and latencies of a real run, named as the simulator names its own."""
    first = [came[0] - arrival for came, arrival in zip(times.seconds, arrivals, strict=True)]
    whole = [came[-1] - arrival for came, arrival in zip(times.seconds, arrivals, strict=True)]
    gaps = [after - before for came in times.seconds for before, after in itertools.pairwise(came)]
    seconds = max(came[-1] for came in times.seconds) - arrivals[0]
    stats = engine.stats
    return {
        "seconds": seconds,
        "tokens_per_s": stats.new_tokens / seconds,
        "requests_per_s": len(times.tokens) / seconds,
        "steps": stats.steps,
        "rows_per_step": (stats.new_tokens - len(times.tokens)) / stats.steps,
        "layers_per_step": stats.layer_reads / stats.steps,
        "prompt_seconds": stats.prompt_seconds,
        "decode_seconds": stats.after_prompts,
        "first_token_s": spread(first),
        "inter_token_s": spread(gaps),
        "request_s": spread(whole),
    }


def compared(real: dict[str, Any], told: Simulation) -> dict[str, Any]:
    """A real run, the simulated one, and the latter over the former."""
    said = told.to_dict()
    ratios = {
        name: said[name] / real[name]
        for name in ("seconds", "tokens_per_s", "steps", "prompt_seconds", "decode_seconds")
    }
    for name in ("first_token_s", "inter_token_s", "request_s"):
        for which in ("p50", "p99"):
            ratios[f"{name} {which}"] = said[name][which] / real[name][which]
    return {"real": real, "simulated": said, "simulated_over_real": ratios}


# ---------------------------------------------------------------------- batch


def ideal_seconds(
    cost: CostModel, schedule: Schedule, prompts: Sequence[int], outputs: Sequence[int], rows: int
) -> Any:
    """Seconds of prompts and of decoding with every row in use: see the top of this file."""
    chunk = 512
    prompt = sum(prompts) / chunk * cost.prompt_seconds(schedule, chunk)
    decode, step = 0.0, cost.at(rows)
    for length, new in zip(prompts, outputs, strict=True):
        for position in range(new - 1):
            budget = schedule.budget(position)
            read = step.kv_seconds * (length + position + 1)
            decode += step.fixed_seconds / rows + budget * (step.layer_seconds / rows + read)
    return {"prompt_seconds": prompt, "decode_seconds": decode}


def batch(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """The batch job under both schedules."""
    found: dict[str, Any] = {}
    for schedule in (Schedule.full(job.model.num_layers), job.schedule.with_speedup(options.nominal)):
        engine = FastEngine(job.model, schedule, max_rows=options.rows, refill_below=options.refill_below)
        requests = [Request(tuple(p), job.limit, stop_ids=job.ends) for p in job.prompts]
        arrivals = [0.0] * len(requests)
        times, cost = calibrated(job, engine, requests, arrivals, options.rows)
        real = figures(times, arrivals, engine)
        lengths = [len(row) for row in times.tokens]
        prompts = [len(p) for p in job.prompts]
        trace = [Arrival(0.0, p, n, job.limit) for p, n in zip(prompts, lengths, strict=True)]
        told = simulate(
            trace, cost, schedule, max_rows=options.rows, policy="static", refill_below=options.refill_below
        )
        ideal = ideal_seconds(cost, schedule, prompts, lengths, options.rows)
        found[schedule.name] = compared(real, told) | {
            "cost": cost.to_dict(),
            "new_tokens": sum(lengths),
            "ideal": ideal,
            "share_of_ideal": sum(ideal.values()) / real["seconds"],
            "decode_share_of_ideal": ideal["decode_seconds"] / (real["seconds"] - real["prompt_seconds"]),
        }
        _tell(schedule.name, found[schedule.name])
    return found


# ---------------------------------------------------------------------- stream


def stream(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Capacity and Poisson runs of full depth and the flat schedule of the same mean depth."""
    full = Schedule.full(job.model.num_layers)
    flat = job.schedule.with_speedup(options.nominal).flattened()
    prompts = job.prompts[: options.stream_requests]
    natural = FastEngine(job.model, full, max_rows=options.rows)
    requests = [Request(tuple(p), job.limit, stop_ids=job.ends) for p in prompts]
    lengths = [len(row) for row in run_stream(natural, requests, [0.0] * len(prompts)).tokens]
    work = [Request(tuple(p), n) for p, n in zip(prompts, lengths, strict=True)]
    found: dict[str, Any] = {}

    def measure(name: str, schedule: Schedule, rate: float | None) -> float:
        stream = itertools.repeat(0.0) if rate is None else bursts(rate, 1, options.seed)
        arrivals = list(itertools.islice(stream, len(work)))
        refill_below, in_order = POLICIES["continuous"]
        engine = FastEngine(
            job.model,
            schedule,
            max_rows=options.rows,
            refill_below=refill_below,
            in_order=in_order,
            prompt_tokens=options.prompt_tokens,
        )
        times, cost = calibrated(job, engine, work, arrivals, options.rows)
        trace = [Arrival(t, len(r.prompt), r.max_new_tokens, job.limit) for t, r in zip(arrivals, work, strict=True)]
        told = simulate(trace, cost, schedule, max_rows=options.rows, prompt_chunk=options.prompt_tokens)
        found[name] = {"rate": rate, "cost": cost.to_dict()} | compared(figures(times, arrivals, engine), told)
        _tell(name, found[name])
        return float(found[name]["real"]["requests_per_s"])

    finished: dict[str, list[float]] = {"full": [], "flat": []}
    for turn in range(options.rounds):
        for name, schedule in (("full", full), ("flat", flat)):
            finished[name].append(measure(f"{name}, all at once, round {turn + 1}", schedule, None))
    most, flat_most = (statistics.median(finished[name]) for name in ("full", "flat"))
    measure(f"full, {options.load:.0%} load", full, options.load * most)
    measure(f"flat, {options.load:.0%} of full depth's load", flat, options.load * most)
    measure(f"flat, {options.load:.0%} of its own load", flat, options.load * flat_most)
    return found | {"throughput_over_full_depth": flat_most / most, "flat_layers": flat.budget(0)}


def _tell(name: str, result: dict[str, Any]) -> None:
    ratios = {key: round(value, 2) for key, value in result["simulated_over_real"].items()}
    print(f"{name}: {json.dumps(result['real'])}\n    simulated/real: {json.dumps(ratios)}", flush=True)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("part", choices=("batch", "stream"))
    parser.add_argument(
        "--model", default="e2e-smollm2-135m", help="a model that carries the schedule that it was tuned for"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="E2E records (JSONL)")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--stream-requests", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32, help="most rows of a batch")
    parser.add_argument(
        "--refill-below", type=float, default=0.0, help="batch: share of slots in use below which requests join"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="stream: most prompt tokens of one forward")
    parser.add_argument("--rounds", type=int, default=3, help="stream: runs of each schedule that measure capacity")
    parser.add_argument("--nominal", type=float, default=2.0)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    job = load(options)
    found = {"batch": batch, "stream": stream}[options.part](job, options)
    before = read_result(options.out, "benchmark") if options.out.exists() else {}
    others = {part: before[part] for part in ("batch", "stream") if part in before}
    part = {"environment": environment(), "config": config_of(options), "runs": found}
    write_result(options.out, "scheduling", others | {options.part: part})


if __name__ == "__main__":
    main()
