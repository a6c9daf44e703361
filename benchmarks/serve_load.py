"""Many streams at once against `skipdecode serve`, at full depth, under a flat schedule, with split prompts in turn.

Starts the server as a process of its own on a free port of this machine, and stops it. In each phase `--streams`
clients ask for one completion after the other until the phase's time is over; then its last streams end, and the next
phase begins. With `--rate`, requests come at random times instead (a Poisson process, the same times for each
schedule), and nothing is kept of their prompts. Every stream's text is compared with what the engine gives offline for
the same request, alone in its process. Throughput is that of the tokens which arrive in a phase after its first
`--warm-up` seconds.

    python benchmarks/serve_load.py --model smollm2-135m --out results/serve-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop
from peers import CLI, PORT, serving
from shared import script_parser, write_result

from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.opening import end_tokens
from skipdecode.models.loading.checkpoint import open_checkpoint
from skipdecode.models.loading.hub import load_model

FULL = "full"
SUBJECTS = ("The old bridge", "A small boat", "My neighbour", "The first train", "A good teacher", "The night market")
ENDINGS = ("was known for", "had never seen", "used to be", "is the reason why", "could not find")
PROMPTS = [f"{subject} {ending}" for subject in SUBJECTS for ending in ENDINGS]


def prompts(words: int) -> list[str]:
    """Prompts with about so many words before the last sentence's beginning."""
    text = " ".join(f"{prompt} many things." for prompt in PROMPTS).split()
    return [" ".join([*islice(cycle(text), 7 * i, 7 * i + words), prompt]) for i, prompt in enumerate(PROMPTS)]


def schedules(options: argparse.Namespace) -> list[Schedule]:
    """Full depth, the flat schedule, and with `--prompt-layers` the flat schedule with split prompts."""
    layers = open_checkpoint(options.model).num_layers
    flat = Schedule.from_speedup(layers, options.nominal, 128).flattened()
    lowest = options.prompt_layers
    return [Schedule.full(layers), flat, *([flat.with_prompt(tuple(range(lowest)))] if lowest else [])]


@dataclass
class Stream:
    """One completion as a client saw it."""

    prompt: str
    new: int
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    asked: float = 0.0
    tokens: int = 0
    error: str = ""


@dataclass
class Phase:
    """One stretch under one schedule."""

    schedule: str
    begin: float
    end: float
    streams: list[Stream]


# ---------------------------------------------------------------------- the server


def server(options: argparse.Namespace, *more: str) -> contextlib.AbstractContextManager[tuple[str, psutil.Process]]:
    """A running server's address and process; in fp32, in which texts do not depend on the batch."""
    command = [*CLI, "serve", options.model, "--port", PORT, "--dtype", "float32", *more]
    return serving(command, "/health/ready")


# ---------------------------------------------------------------------- clients


class Receiver(asyncio.Protocol):
    """Sends one request and notes what comes, and when, to the end of the connection. As little work as can be: the
    client shares the machine with the server."""

    def __init__(self, stream: Stream, request: bytes, done: asyncio.Future[None]) -> None:
        self.stream, self.request, self.done = stream, request, done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.stream.parts.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


async def one_stream(port: int, prompt: str, schedule: str, new: int) -> Stream:
    """Ask, and take what comes to the end; the bytes are read when the phase is over."""
    stream = Stream(prompt, new, asked=time.perf_counter())
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
    body["skipdecode"] = {"schedule": schedule}
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    await loop.create_connection(lambda: Receiver(stream, request, done), "127.0.0.1", port)
    await done
    return stream


def read_parts(stream: Stream) -> None:
    """Fill in what a stream's bytes say; a part is one or more whole HTTP chunks."""
    received = b"".join(part for _, part in stream.parts)
    head, _, rest = received.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        stream.error = received[:300].decode(errors="replace")
        return
    events = [line[6:] for line in rest.splitlines() if line.startswith(b"data: ")]
    done = bool(events) and events[-1] == b"[DONE]"
    for event in events[:-1] if done else events:
        chunk = json.loads(event)
        if "error" in chunk:
            stream.error = chunk["error"]["message"]
            return
        stream.text += "".join(choice["text"] for choice in chunk["choices"])
        if "skipdecode" in chunk:
            stream.tokens = chunk["skipdecode"]["completion_tokens"]
    if not done:
        stream.error = "the stream ended without [DONE]"
    for at, part in stream.parts:
        stream.arrivals += [at] * part.count(b'data: {"')
    stream.parts = []


async def one_phase(port: int, schedule: str, options: argparse.Namespace) -> Phase:
    """All clients under one schedule, until the last stream's end."""
    begin = time.perf_counter()
    end = begin + options.phase
    texts = prompts(options.words)
    streams: list[Stream] = []

    async def one(number: int) -> None:
        # Of different lengths, as in life: streams that begin together do not end together.
        new = options.new // 2 + number * 37 % options.new
        streams.append(await one_stream(port, texts[number % len(texts)], schedule, new))

    async def client(number: int) -> None:
        while time.perf_counter() < end:
            await one(number)
            number += options.streams

    async def visitor(number: int, at: float) -> None:
        await asyncio.sleep(begin + at - time.perf_counter())
        await one(number)

    if options.rate is None:
        await asyncio.gather(*(client(number) for number in range(options.streams)))
    else:
        await asyncio.gather(*(visitor(number, at) for number, at in enumerate(arrivals(options.rate, options.phase))))
    for stream in streams:
        read_parts(stream)
    return Phase(schedule, begin, end, streams)


def arrivals(rate: float, seconds: float) -> list[float]:
    """The times of a Poisson process, in seconds from the beginning of a phase."""
    draw, times = random.Random(0), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + draw.expovariate(rate))
    return times[1:-1]


async def load(url: str, process: psutil.Process, options: argparse.Namespace) -> tuple[list[Phase], list[list[float]]]:
    """All phases, and the server's memory: [seconds, MiB] once a second."""
    memory: list[list[float]] = []
    start = time.perf_counter()

    async def watch() -> None:
        while True:
            memory.append([round(time.perf_counter() - start, 1), round(process.memory_info().rss / 2**20, 1)])
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    names = [schedule.name for schedule in schedules(options)]
    port = httpx.URL(url).port or 80
    phases = []
    for schedule in names:  # engines and buffers come with the first request
        await one_stream(port, prompts(options.words)[0], schedule, 2)
    while time.perf_counter() - start < options.seconds:
        for schedule in names:
            phases.append(await one_phase(port, schedule, options))
            print(f"{phases[-1].schedule}: {rate(phases[-1], options.warm_up):.0f} tokens/s", file=sys.stderr)
    watching.cancel()
    return phases, memory


# ---------------------------------------------------------------------- figures


def rate(phase: Phase, warm_up: float) -> float:
    """Tokens a second that arrived between warm-up and the phase's end; a stream's tokens spread over its chunks."""
    first = phase.begin + warm_up
    tokens = 0.0
    for stream in phase.streams:
        inside = sum(first <= at < phase.end for at in stream.arrivals)
        tokens += stream.tokens * inside / max(1, len(stream.arrivals))
    return tokens / (phase.end - first)


def offline_texts(options: argparse.Namespace) -> Callable[[str, Stream], str]:
    """What the engine gives for a schedule and a stream's request, in batches of another size than the server's."""
    loaded = load_model(options.model, dtype="float32")
    tokenizer: Any = loaded.tokenizer
    ends = frozenset(end_tokens(loaded.model, tokenizer))
    longest = options.new * 3 // 2
    texts = prompts(options.words)
    requests = [Request(tuple(tokenizer(p).input_ids), longest, stop_ids=ends) for p in texts]
    found: dict[tuple[str, str], list[int]] = {}
    fast = None
    for schedule in schedules(options):
        engine = FastEngine(fast or loaded.model, schedule, max_rows=7)
        fast = engine.model
        for prompt, row in zip(texts, engine.decode(requests), strict=True):
            found[schedule.name, prompt] = row.tokens

    def text(schedule: str, stream: Stream) -> str:
        return str(tokenizer.decode(found[schedule, stream.prompt][: stream.new], skip_special_tokens=True))

    return text


def summary(phases: list[Phase], memory: list[list[float]], options: argparse.Namespace) -> dict[str, Any]:
    """Per schedule: medians over its phases."""
    schedules = {}
    for name in dict.fromkeys(phase.schedule for phase in phases):
        mine = [phase for phase in phases if phase.schedule == name]
        streams = [stream for phase in mine for stream in phase.streams if not stream.error]
        firsts = sorted(s.arrivals[0] - s.asked for s in streams)
        gaps = sorted(b - a for s in streams for a, b in zip(s.arrivals, s.arrivals[1:], strict=False))
        rates = [rate(phase, options.warm_up) for phase in mine]
        schedules[name] = {
            "tokens_per_s": statistics.median(rates),
            "tokens_per_s_of_phases": rates,
            "streams": len(streams),
            "tokens": sum(s.tokens for s in streams),
            "first_token_s": quantiles(firsts),
            "between_chunks_s": quantiles(gaps),
        }
    last = memory[-1][0]
    settled = [mib for at, mib in memory if at > last / 3]
    half = len(settled) // 2
    return {
        "schedules": schedules,
        "memory_mib": memory,
        "memory_first_half_max_mib": max(settled[:half], default=0.0),
        "memory_second_half_max_mib": max(settled[half:], default=0.0),
    }


def quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": values[min(len(values) - 1, q * len(values) // 100)] for q in (50, 95, 99)} if values else {}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The load, the comparison, the figures."""
    more = ["--max-rows", str(options.streams), "--log-level", "warning"]
    more += ["--threads", str(options.threads)] if options.threads else []
    more += ["--no-prefix-cache", "--max-waiting", "100000"] if options.rate else []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for schedule in schedules(options)[1:]:
            schedule.save(folder / f"{schedule.name}.json")
        url, process = stack.enter_context(server(options, *more, "--schedule", *map(str, sorted(folder.iterdir()))))
        phases, memory = uvloop.run(load(url, process, options))
        metrics = httpx.get(f"{url}/metrics").text
    text = offline_texts(options)
    streams = [(phase.schedule, stream) for phase in phases for stream in phase.streams]
    errors = [stream.error for _, stream in streams if stream.error]
    wrong = [s.prompt for name, s in streams if not s.error and s.text != text(name, s)]
    found = summary(phases, memory, options)
    rates = [each["tokens_per_s"] for each in found["schedules"].values()]
    if not rates[0]:
        raise SystemExit(f"no token of a stream at full depth has arrived: {errors[:1]}")
    return {
        "speedup": rates[1] / rates[0],
        "streams": len(streams),
        "errors": errors[:20],
        "streams_unlike_offline": len(wrong),
        "rows_left": gauge(metrics, "running_rows"),
        "kv_bytes_left": gauge(metrics, "kv_bytes_held"),
        **found,
    }


def gauge(metrics: str, name: str) -> float:
    line = next(line for line in metrics.splitlines() if line.startswith(f"skipdecode_{name} "))
    return float(line.split()[1])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=64, help="clients at a time")
    parser.add_argument("--seconds", type=float, default=120.0, help="of load; the last phases are completed")
    parser.add_argument("--phase", type=float, default=30.0, help="seconds of a phase")
    parser.add_argument(
        "--warm-up",
        type=float,
        default=10.0,
        help="first seconds of a phase without throughput: streams are of one age",
    )
    parser.add_argument(
        "--new", type=int, default=192, help="mean new tokens of a stream; from half to one and a half of it"
    )
    parser.add_argument("--nominal", type=float, default=2.0, help="nominal speed-up of the flat schedule")
    parser.add_argument(
        "--prompt-layers", type=int, help="lowest layers that split prompts run; default: no such phases"
    )
    parser.add_argument("--rate", type=float, help="requests a second at random times; default: --streams clients")
    parser.add_argument("--words", type=int, default=0, help="words of a prompt before its last sentence")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of the server")
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    found = run(options)
    write_result(options.out, "serve-load", found, options)
    for name, each in found["schedules"].items():
        print(f"{name:>24}: {each['tokens_per_s']:7.1f} tokens/s, {each['streams']} streams")
        for kind in ("first_token_s", "between_chunks_s"):
            print(f"{kind:>26}: {', '.join(f'{q} {1000 * s:.0f} ms' for q, s in each[kind].items())}")
    print(
        f"speed-up {found['speedup']:.2f}, {len(found['errors'])} errors, {found['streams_unlike_offline']} of "
        f"{found['streams']} streams unlike offline, memory {found['memory_first_half_max_mib']:.0f} -> "
        f"{found['memory_second_half_max_mib']:.0f} MiB"
    )


if __name__ == "__main__":
    main()
