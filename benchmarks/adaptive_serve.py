"""A stream of mixed requests at `skipdecode serve`: one depth for all, and a router's depths at the same mean cost.

The checkpoint has its router.json beside the weights. The server is a process of its own; `--streams` clients ask for
one record after the other, in mixed order, first under the flat depth, then under `adaptive` with the speed-up at which
the router prices that depth, in turn. Latencies are of whole requests; scores of each record's text, with paired 95%
intervals over the records that both answered.

    python benchmarks/adaptive_serve.py --model CHECKPOINT --flat flat-15 --data e2e=e2e/test.jsonl \
        benchmarks/tasks/tldr.yaml=tldr/test.jsonl --out results/adaptive-serve-smollm2-135m.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from serve_load import Phase, Stream, one_stream, quantiles, rate, read_parts, server

from skipdecode.common.environment import environment
from skipdecode.common.kinds import heading
from skipdecode.data.prompts import encode_prompts
from skipdecode.data.source import load_records
from skipdecode.data.tasks import load_task
from skipdecode.engine.adaptive import ROUTER_FILE, Router
from skipdecode.evaluation.bootstrap import compare
from skipdecode.evaluation.metrics import make_metrics
from skipdecode.evaluation.scores import scorer_of
from skipdecode.evaluation.settings import MetricOptions
from skipdecode.models.loading.hub import load_model

Asked = tuple[list[int], int, Any, tuple[str, ...]]
"""Of a record: its prompt, most new tokens, its task, its references."""


def records_of(options: argparse.Namespace) -> list[Asked]:
    """All records, mixed."""
    tokenizer, found = load_model(options.model).tokenizer, list[Asked]()
    for name, path in options.data:
        task = load_task(name)
        records, prompts = encode_prompts(task.template(), load_records(task, path).limited(options.limit), tokenizer)
        rows = zip(records.items, prompts, strict=True)
        found += [(prompt, task.max_new_tokens, task, tuple(record.references)) for record, prompt in rows]
    random.Random(0).shuffle(found)
    return found


async def one_phase(
    port: int, name: str, bounds: dict[str, float], records: list[Asked], options: argparse.Namespace
) -> tuple[Phase, list[int]]:
    """All clients under one schedule, until the last stream's end; and which record each stream was for."""
    begin = time.perf_counter()
    end, streams, which = begin + options.phase, list[Stream](), list[int]()

    async def ask(number: int) -> None:
        while time.perf_counter() < end:
            prompt, new, _, _ = records[number % len(records)]
            stream = await one_stream(port, prompt, name, new, **bounds)
            streams.append(stream)
            which.append(number % len(records))
            number += options.streams

    await asyncio.gather(*(ask(number) for number in range(options.streams)))
    for stream in streams:
        read_parts(stream)
    return Phase(name, begin, end, streams), which


def figures(phases: list[tuple[Phase, list[int]]], warm_up: float) -> dict[str, Any]:
    """Medians over a schedule's phases; latencies of all of its streams."""
    streams = [stream for phase, _ in phases for stream in phase.streams if not stream.error]
    rates = [rate(phase, warm_up) for phase, _ in phases]
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_of_phases": rates,
        "requests_per_s": statistics.median(
            len(p.streams) / (max(s.arrivals[-1] for s in p.streams if s.arrivals) - p.begin) for p, _ in phases
        ),
        "streams": len(streams),
        "mean_layers": sum(s.layers for s in streams) / sum(s.tokens for s in streams),
        "first_token_s": quantiles(sorted(s.arrivals[0] - s.asked for s in streams)),
        "request_s": quantiles(sorted(s.arrivals[-1] - s.asked for s in streams)),
        "errors": [stream.error for phase, _ in phases for stream in phase.streams if stream.error][:5],
    }


def scores(taken: dict[str, Any], records: list[Asked], names: list[str]) -> dict[str, Any]:
    """Each schedule's scores on the records that all answered, and the second's beyond the first's."""
    texts = {
        name: {
            i: records[i][2].cut(stream.text)
            for phase, which in phases
            for i, stream in zip(which, phase.streams, strict=True)
            if not stream.error
        }
        for name, phases in taken.items()
    }
    common = sorted(set.intersection(*(set(found) for found in texts.values())))
    metrics, result = make_metrics(names, MetricOptions(bertscore_model="minilm")), dict[str, Any](n=len(common))
    for metric in metrics:
        tables = [
            np.asarray(metric.statistics([found[i] for i in common], [records[i][3] for i in common]))
            for found in texts.values()
        ]
        values = {n: float(scorer_of(metric.name)(t.sum(0))) for n, t in zip(texts, tables, strict=True)}
        beyond = compare(tables[0], tables[1], scorer_of(metric.name)).difference
        result[metric.name] = values | {"beyond": [beyond.estimate, beyond.low, beyond.high]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint's directory, with its router.json")
    parser.add_argument("--flat", required=True, help="name of one of the router's depths")
    parser.add_argument(
        "--data", nargs="+", required=True, type=lambda text: tuple(text.split("=", 1)), metavar="TASK=FILE"
    )
    parser.add_argument("--limit", type=int, default=100, help="records of each task")
    parser.add_argument("--streams", type=int, default=32, help="clients at a time")
    parser.add_argument("--phase", type=float, default=20.0, help="seconds of a phase")
    parser.add_argument("--warm-up", type=float, default=5.0, help="first seconds of a phase that do not count")
    parser.add_argument("--rounds", type=int, default=3, help="phases of each schedule")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--metrics", nargs="+", default=["rougeL"])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    router = Router.load(Path(options.model) / ROUTER_FILE)
    number = next(i for i, depth in enumerate(router.depths) if depth.name == options.flat)
    flat, speedup = router.depths[number], 1 / router.costs[number]
    asked: dict[str, dict[str, float]] = {flat.name: {}, "adaptive": {"speedup": speedup}}
    records, taken = records_of(options), {name: list[Any]() for name in asked}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "flat.json"
        flat.save(file)
        more = ["--schedule", str(file), "--max-rows", str(options.streams), "--log-level", "warning"]
        with server(options, *more, "--dtype", options.dtype) as (url, _):
            port = httpx.URL(url).port or 80
            for _ in range(options.rounds):
                for name, bounds in asked.items():
                    taken[name].append(asyncio.run(one_phase(port, name, bounds, records, options)))
                    print(f"{name}: {rate(taken[name][-1][0], options.warm_up):.0f} tokens/s", flush=True)
    document = {
        **heading("adaptive-serve"),
        "environment": environment(),
        "config": vars(options) | {"out": str(options.out), "speedup": speedup},
        "schedules": {name: figures(phases, options.warm_up) for name, phases in taken.items()},
        "scores": scores(taken, records, options.metrics),
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, found in document["schedules"].items():
        line = "{tokens_per_s:.0f} tokens/s, {requests_per_s:.2f} requests/s, {mean_layers:.1f} layers"
        spread = ", ".join(f"{q} {seconds:.2f} s" for q, seconds in found["request_s"].items())
        print(f"{name:>10}: {line.format_map(found)}, requests {spread}")
    print(json.dumps(document["scores"]))


if __name__ == "__main__":
    main()
