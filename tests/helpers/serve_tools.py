"""A tiny model behind a real server on a free port of this machine, in a thread."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from checkpoints import byte_tokenizer
from skipdecode import Schedule
from skipdecode.common.progress import note
from skipdecode.engine import FastEngine, Request, Sampling
from skipdecode.engine.opening import open_engines
from skipdecode.serving.limits import Binding, ServerLimits
from skipdecode.serving.middleware import ApiKeys
from skipdecode.serving.server import make_server
from skipdecode.serving.service import Service, open_service
from textgen_tools import command, subprocess_environment
from tiny import LAYERS, tiny_model

CONTEXT = 2048
NESTED = Schedule.from_speedup(LAYERS, 2, 16, name="nested")
OTHER_ORDER = Schedule.even(LAYERS, (6, 5, 4), name="even")
SCHEDULES = {"full": Schedule.full(LAYERS), "nested": NESTED, "even": OTHER_ORDER}


def tiny_served_model(family: str = "llama") -> Any:
    model = tiny_model(family, vocab_size=259, max_position_embeddings=CONTEXT)
    model.generation_config.eos_token_id = 2
    return model


def tiny_service(
    *, family: str = "llama", engine: str = "fast", checkpoint_schedule: Schedule | None = None, **limits: Any
) -> Service:
    model = tiny_served_model(family)
    return open_service(
        model,
        byte_tokenizer(),
        name="tiny",
        checkpoint_schedule=checkpoint_schedule,
        others=(NESTED, OTHER_ORDER),
        backend=open_engines(model, engine, note),
        limits=ServerLimits(**limits),
    )


@contextlib.contextmanager
def running(
    service: Service, keys: ApiKeys | None = None, drain_seconds: float = 5.0, **options: Any
) -> Iterator[httpx.Client]:
    """A client of the service's server; the server is stopped at the end."""
    binding = Binding(port=0, drain_seconds=drain_seconds, log_level="warning", **options)
    server = make_server(service, binding, keys)
    sock = socket.socket()
    # Small, so that a client that does not read is felt soon.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    sock.bind(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            client.server = server
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def serving(model: str, *arguments: str, key: str | None = None, stderr: Any = None) -> Iterator[tuple[str, Any]]:
    """A server in a process of its own: its address, and the process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    environment = subprocess_environment() | ({"SKIPDECODE_API_KEY": key} if key else {})
    options = command("serve", model, "--port", str(port), *arguments)
    process = subprocess.Popen(options, stderr=stderr, env=environment)

    def is_up() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{address}/health/ready").status_code == 200
        return False

    try:
        until(lambda: is_up() or process.poll() is not None, 120)
        assert process.poll() is None, "the server has stopped"
        yield address, process
    finally:
        process.terminate()
        process.wait(30)


def until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def before_steps(service: Service, act: Callable[[], object]) -> None:
    """Have `act` run before each step of the engines that the worker makes from now on."""
    make = service.worker._make_engine

    def made() -> Any:
        engine = make()
        step = engine.step

        def stepped() -> Any:
            act()
            return step()

        engine.step = stepped
        return engine

    service.worker._make_engine = made


def slowed(service: Service, seconds: float) -> Service:
    """The service with steps that take at least so long, so that there is time to do something meanwhile."""
    before_steps(service, lambda: time.sleep(seconds))
    return service


def offline(prompt: str, new: int, schedule: Schedule = SCHEDULES["full"], sampling: Sampling | None = None) -> Any:
    """Tokens, their text and their layers, from the engine alone."""
    tokenizer = byte_tokenizer()
    request = Request(tuple(tokenizer(prompt).input_ids), new, sampling or Sampling(), frozenset({2}))
    outputs = list(FastEngine(tiny_served_model(), schedule).run([request]))
    tokens = [out.token for out in outputs]
    return tokens, tokenizer.decode(tokens, skip_special_tokens=True), [out.layers for out in outputs]


def greedy(**fields: Any) -> dict[str, Any]:
    return {"temperature": 0, **fields}


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream; checks its frame."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def metric(service: Service, name: str, **labels: str) -> float:
    """A metric's value, 0 if it was never set; `name` without the package's prefix."""
    return service.metrics.registry.get_sample_value(f"skipdecode_{name}", labels) or 0.0


def is_idle(service: Service) -> bool:
    """Whether no row, no keys and values and no waiting choice is left."""
    names = ("running_rows", "kv_bytes_held", "kv_bytes_saved", "queue_length")
    return not any(metric(service, name) for name in names)


def post(client: Any, path: str, body: Any, status: int = 200) -> Any:
    """The JSON of an answer, which has to have this status."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()
