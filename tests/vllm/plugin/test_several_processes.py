"""Tensor and pipeline parallel on a CPU, and the OpenAI server: engines of several processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engines import engine, generate, paper, prompts, reference, stock_environment
from skipdecode import Schedule
from tiny import LAYERS

pytestmark = pytest.mark.several
STREAMS = 200


@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_processes_share_a_model(checkpoint: Any, split: str):
    folder, model = checkpoint
    texts, new = prompts((9, 40, 17, 4, 25)), (20, 16, 30, 28, 12)
    even = Schedule.even(LAYERS, (6, 5, 4), name="even")
    halves = Schedule.split(LAYERS, 4, (6, 5, 3), name="halves")
    names = ["skipdecode", "halves", "even", "full", "halves"]
    by_name = {"skipdecode": paper(), "even": even, "full": Schedule.full(LAYERS), "halves": halves}
    options: dict[str, Any] = {split: 2, "distributed_executor_backend": "mp", "max_num_batched_tokens": 24}
    options["enforce_eager"] = False
    extra = {"skipdecode": {"schedules": [even.to_dict(), halves.to_dict()]}}
    with engine(folder, additional_config=extra, **options) as llm:
        found = generate(llm, texts, new, names)
    for text, count, name, tokens in zip(texts, new, names, found, strict=True):
        assert tokens == reference(model, by_name[name], [text], [count])[0], name


# ---------------------------------------------------------------------- the server


@pytest.fixture(scope="module")
def server(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint[0])]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "256"]
    command += ["--served-model-name", "tiny", "--block-size", "32", "--max-num-seqs", "16", "--enforce-eager"]
    environment = stock_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out, env=environment) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_up(url, process, log)
            yield url
        finally:
            process.terminate()


def wait_until_up(url: str, process: Any, log: Path) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return
        except OSError:
            if process.poll() is not None:
                pytest.fail(log.read_text()[-3000:])
            time.sleep(1)
    pytest.fail(log.read_text()[-3000:])


def metrics_of(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.split("{")[0].split(" ")[0], line.rsplit(" ", 1)[1]
            found[name] = found.get(name, 0) + float(value)
    return found


def ask(url: str, prompt: list[int], new: int, **more: Any) -> Any:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | more
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request, timeout=120)


def test_the_server_skips_and_counts(checkpoint: Any, server: str):
    texts = prompts((9, 30))
    for name, schedule in (("skipdecode", paper()), ("full", Schedule.full(LAYERS))):
        for text in texts:
            answer = json.load(ask(server, text, 20, vllm_xargs={"skipdecode": name}))
            assert answer["choices"][0]["token_ids"] == reference(checkpoint[1], schedule, [text], [20])[0]
    metrics = metrics_of(server)
    assert metrics["skipdecode_decode_tokens_total"] == 4 * 19
    by_layer = 2 * 19 * LAYERS + 2 * sum(paper().budget(i) for i in range(19))
    assert metrics["skipdecode_decode_token_layers_total"] == by_layer
    assert metrics["skipdecode_request_layers_count"] == 4
    assert metrics["skipdecode_layers_total"] < metrics["skipdecode_steps_total"] * LAYERS


def test_an_unknown_schedule_is_the_clients_mistake(server: str):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, [5, 6, 7], 4, vllm_xargs={"skipdecode": "fast"})
    assert caught.value.code == 400
    message = json.load(caught.value)["error"]["message"]
    assert "unknown schedule 'fast': this server has 'skipdecode', 'full'" in message


def test_the_openai_client(checkpoint: Any, server: str):
    from openai import OpenAI

    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        extra_body={"vllm_xargs": {"skipdecode": "skipdecode"}, "ignore_eos": True},
    )
    assert sum(1 for _ in stream) >= 2


def test_vllms_own_load_generator(checkpoint: Any, server: str, tmp_path: Path):
    """What `vllm bench serve` runs; the command itself wants a distribution named vllm."""
    code = (
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
        "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
    )
    command = [sys.executable, "-c", code, "--backend", "openai"]
    command += ["--base-url", server, "--model", "tiny", "--tokenizer", str(checkpoint[0]), "--dataset-name", "random"]
    command += ["--random-input-len", "24", "--random-output-len", "16", "--num-prompts", "24", "--ignore-eos"]
    command += ["--extra-body", json.dumps({"vllm_xargs": {"skipdecode": "skipdecode"}})]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "load.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "load.json").read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (24, 0, 24 * 16)


def test_cancelled_streams_leave_nothing_running(server: str):
    def cancel(number: int) -> None:
        with ask(server, prompts((8,), seed=number)[0], 200, stream=True) as stream:
            stream.readline()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(cancel, range(STREAMS)))
    for _ in range(60):
        metrics = metrics_of(server)
        if metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0:
            break
        time.sleep(1)
    assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
