"""What a server must bear: clients that hang up, read slowly, send nonsense or a wrong key; SIGTERM under load.

Starts `skipdecode serve` as a process of its own, does all of it in turn, and writes what came back. After each part
the server must answer with the same text as before, and hold no row and no keys and values.

    python benchmarks/serve_faults.py --model smollm2-135m --out results/serve-faults-smollm2-135m-cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import psutil
from serve_load import gauge, server
from shared import script_parser, write_result

from skipdecode.serving.middleware import ENVIRONMENT_VARIABLE

KEY = "the-key-of-this-run"
PATH = "/v1/completions"
BODY = {"prompt": "The old bridge", "max_tokens": 24, "temperature": 0}
LONG = BODY | {"max_tokens": 400, "stream": True}
STALL_SECONDS = 3


class Checks:
    """A server under test, and what it must be like after each part."""

    def __init__(self, client: httpx.AsyncClient, process: psutil.Process, options: argparse.Namespace) -> None:
        self.client = client
        self.process = process
        self.options = options
        self.text = ""

    async def answer(self) -> str:
        """The text of the one request that must always give the same."""
        return str((await self.client.post(PATH, json=BODY)).json()["choices"][0]["text"])

    async def gauges(self) -> dict[str, float]:
        """What the server holds."""
        page = (await self.client.get("/metrics")).text
        return {name: gauge(page, name) for name in ("running_rows", "queue_length", "kv_bytes_held")}

    async def after(self, part: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Run a part, then wait until nothing is held, and ask once more."""
        start = time.perf_counter()
        found = await part()
        found["seconds"] = round(time.perf_counter() - start, 2)
        for _ in range(300):
            held = await self.gauges()
            if not any(held.values()):
                break
            await asyncio.sleep(0.1)
        found["held_after"] = held
        found["seconds_until_free"] = round(time.perf_counter() - start - found["seconds"], 2)
        found["same_text_after"] = await self.answer() == self.text
        found["memory_mib"] = round(self.process.memory_info().rss / 2**20)
        return found

    # ------------------------------------------------------------------ parts

    async def hang_up(self) -> dict[str, Any]:
        """Clients that close the connection in the middle of their stream."""
        random.seed(0)
        gate = asyncio.Semaphore(64)
        statuses: Counter[str] = Counter()

        async def one() -> None:
            async with gate:
                try:
                    async with self.client.stream("POST", PATH, json=LONG) as response:
                        statuses[str(response.status_code)] += 1
                        chunks = response.aiter_raw()
                        for _ in range(random.randint(0, 4)):
                            await anext(chunks)
                except httpx.HTTPError as e:
                    statuses[type(e).__name__] += 1

        await asyncio.gather(*(one() for _ in range(self.options.clients)))
        return {"clients": self.options.clients, "statuses": statuses}

    async def read_slowly(self) -> dict[str, Any]:
        """Clients that ask and never read, while others are served."""
        sockets = [self._lazy() for _ in range(8)]
        start = time.perf_counter()
        same = await self.answer() == self.text
        seconds = time.perf_counter() - start
        await asyncio.sleep(STALL_SECONDS + 1)
        for sock in sockets:
            sock.close()
        return {"clients": len(sockets), "another_client_same_text": same, "another_client_s": round(seconds, 3)}

    def _lazy(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", self.client.base_url.port))
        content = json.dumps(LONG | {"skipdecode": {"trace": True}, "logprobs": 5}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {KEY}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        sock.sendall(head.encode() + content)
        return sock

    async def nonsense(self) -> dict[str, Any]:
        """Bodies that are no requests, prompts that are too long, heads that are too large, and wrong keys."""
        random.seed(1)
        whole = json.dumps(BODY).encode()
        bodies = {
            "malformed": [whole[: random.randint(1, len(whole) - 1)] for _ in range(100)],
            "not text": [random.randbytes(200) for _ in range(100)],
            "nested": [b'{"prompt": ' + b"[" * 50_000] * 5,
            "too large": [json.dumps(BODY | {"prompt": "word " * 300_000}).encode()] * 5,
            "too long": [json.dumps(BODY | {"prompt": "word " * 150_000}).encode()] * 5,
        }
        found: dict[str, Any] = {}
        for name, contents in bodies.items():
            statuses: Counter[int] = Counter()
            for content in contents:
                headers = {"content-type": "application/json"}
                statuses[(await self.client.post(PATH, content=content, headers=headers)).status_code] += 1
            found[name] = statuses
        keys = ["x", KEY[:-1], KEY + "x", KEY.upper(), "x" * 5000]
        wrong = [await self.client.post(PATH, json=BODY, headers={"authorization": f"Bearer {k}"}) for k in keys * 20]
        heads: Counter[str] = Counter()
        for _ in range(100):
            try:
                heads[str((await self.client.get("/health", headers={"x": "y" * 100_000})).status_code)] += 1
            except httpx.HTTPError as e:  # closed while the head is sent
                heads[type(e).__name__] += 1
        found["large head"] = heads
        found["wrong key"] = Counter(response.status_code for response in wrong)
        return found

    async def stop(self) -> dict[str, Any]:
        """SIGTERM while streams run: they end, nothing new is taken, the process exits."""
        ends: Counter[str] = Counter()
        began = asyncio.Event()

        async def one() -> None:
            try:
                async with self.client.stream("POST", PATH, json=LONG | {"max_tokens": 48}) as response:
                    lines = [line async for line in _noting(response.aiter_lines(), began) if line]
                ends["[DONE]" if lines[-1] == "data: [DONE]" else lines[-1][:60]] += 1
            except httpx.HTTPError as e:
                ends[type(e).__name__] += 1

        streams = [asyncio.create_task(one()) for _ in range(32)]
        await began.wait()
        await asyncio.sleep(0.5)
        start = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*streams)
        status = await asyncio.to_thread(self.process.wait, 60)
        return {"streams": len(streams), "ends": ends, "exit": status, "seconds": round(time.perf_counter() - start, 2)}


async def _noting(lines: Any, began: asyncio.Event) -> Any:
    async for line in lines:
        began.set()
        yield line


async def run(url: str, process: psutil.Process, options: argparse.Namespace) -> dict[str, Any]:
    """All parts."""
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=100, max_keepalive_connections=20)
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers, limits=limits) as client:
        checks = Checks(client, process, options)
        checks.text = await checks.answer()
        found = {"memory_before_mib": round(process.memory_info().rss / 2**20)}
        for part in (checks.hang_up, checks.read_slowly, checks.nonsense):
            found[part.__name__] = await checks.after(part)
            print(part.__name__, json.dumps(found[part.__name__]), file=sys.stderr)
        found["stop"] = await checks.stop()
    return found


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=1000, help="that hang up")
    options = parser.parse_args()
    os.environ[ENVIRONMENT_VARIABLE] = KEY
    more = ["--max-rows", "64", "--max-waiting", "256", "--stall-seconds", str(STALL_SECONDS), "--log-level", "warning"]
    with server(options, *more) as (url, process):
        found = asyncio.run(run(url, process, options))
    write_result(options.out, "serve-faults", found, options)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
