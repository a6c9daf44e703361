"""The Ray examples on local Ray clusters: engines in processes of their own, on two workers and on two nodes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from checkpoints import byte_tokenizer
from engines import paper, prompts, reference, stock_environment
from skipdecode import Schedule
from tiny import LAYERS

pytestmark = pytest.mark.several
EXAMPLES = Path(__file__).parents[3] / "examples"
PROMPTS, NEW = 24, 20
# Ray gives its workers the lowest priority but four, which a busy machine hardly runs.
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
ENGINE = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "block_size": 32, "enforce_eager": True}


def test_two_workers_generate_what_transformers_gives(checkpoint: Any, tmp_path: Path):
    pytest.importorskip("ray.data", reason="no ray[data] in this environment")
    folder, model = checkpoint
    lines, out, tokenizer = tmp_path / "prompts.jsonl", tmp_path / "texts", byte_tokenizer()
    texts = ["ab" * (1 + number % 11) + chr(97 + number) for number in range(PROMPTS)]
    lines.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts), encoding="utf-8")
    command = [sys.executable, str(EXAMPLES / "ray_data_llm.py"), str(folder), str(lines), str(out), "--workers", "2"]
    command += ["--gpus-per-worker", "0", "--cpus", "8", "--batch-size", "6", "--engine", json.dumps(ENGINE)]
    command += ["--sampling", json.dumps({"ignore_eos": True, "max_tokens": NEW})]
    # In no cluster that runs here, or ran and left its address.
    alone = stock_environment() | RAY | {"RAY_ADDRESS": "local"}
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = [json.loads(line) for file in sorted(out.glob("*.json*")) for line in file.read_text().splitlines()]
    ids = [tokenizer(t)["input_ids"] for t in texts]
    expected = reference(model, paper(), ids, [NEW] * PROMPTS)
    assert {r["prompt"]: r["text"] for r in rows} == {
        text: tokenizer.decode(tokens, skip_special_tokens=True) for text, tokens in zip(texts, expected, strict=True)
    }


# ---------------------------------------------------------------------- the server on two nodes

EVEN = Schedule.even(LAYERS, (6, 5, 4), name="even")
BY_NAME = {None: paper(), "even": EVEN, "full": Schedule.full(LAYERS)}


class Fleet:
    """Two nodes of two CPUs each, which an engine takes, and the example on them."""

    def __init__(self, folder: Path, log: Path) -> None:
        from ray.cluster_utils import Cluster

        self.metrics = free_ports(2)
        self.cluster = Cluster(True, head_node_args=node_like(self.metrics[0]))
        self.second = self.cluster.add_node(**node_like(self.metrics[1]))
        (port,) = free_ports(1)
        self.url, self.log = f"http://127.0.0.1:{port}", log
        engine = ENGINE | {"additional_config": {"skipdecode": {"schedules": [EVEN.to_dict()]}}}
        command = [sys.executable, str(EXAMPLES / "ray_serve_llm.py"), str(folder), "--name", "tiny", "--cpu"]
        command += ["--replicas", "2", "2", "--port", str(port), "--engine", json.dumps(engine)]
        environment = stock_environment() | RAY | {"RAY_ADDRESS": self.cluster.address}
        self.process = subprocess.Popen(command, env=environment, stdout=log.open("w"), stderr=-2)

    def wait_until_up(self) -> None:
        for _ in range(500):
            assert self.process.poll() is None, self.log.read_text()[-5000:]
            if "is ready at" in self.log.read_text():
                return
            time.sleep(1)
        pytest.fail(self.log.read_text()[-5000:])

    def depth(self, node: int) -> tuple[float, float]:
        """Generated tokens fed back, and layers that they ran, by a node's own metrics."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics[node]}/metrics", timeout=30).read().decode()
        counts = [0.0, 0.0]
        for line in text.splitlines():
            for number, name in enumerate(("tokens", "token_layers")):
                if line.startswith(f"ray_skipdecode_decode_{name}_total{{"):
                    counts[number] += float(line.rsplit(" ", 1)[1])
        return counts[0], counts[1]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.cluster.shutdown()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def node_like(metrics: int) -> dict[str, Any]:
    return {"num_cpus": 2, "metrics_export_port": metrics, "include_dashboard": False}


@pytest.fixture(scope="module")
def fleet(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    pytest.importorskip("ray.serve", reason="no ray[serve] in this environment")
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - stock_environment().keys():
            patch.delenv(name)
        for name, value in RAY.items():
            patch.setenv(name, value)
        fleet = Fleet(checkpoint[0], tmp_path_factory.mktemp("log") / "serve.txt")
    try:
        fleet.wait_until_up()
        yield fleet
    finally:
        fleet.stop()


def ask(fleet: Fleet, prompt: list[int], schedule: str | None) -> list[int]:
    """One request, as any OpenAI client sends it; such a client sends it again where a server failed."""
    from openai import OpenAI

    more = {"ignore_eos": True, "return_token_ids": True} | (
        {"vllm_xargs": {"skipdecode": schedule}} if schedule else {}
    )
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=5) as client:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=NEW, temperature=0, extra_body=more)
    return answer.choices[0].token_ids


def ask_all(fleet: Fleet, texts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda pair: ask(fleet, *pair), zip(texts, names(texts), strict=True)))


def names(texts: list[list[int]]) -> list[str | None]:
    return [list(BY_NAME)[number % 3] for number in range(len(texts))]


def expected(model: Any, texts: list[list[int]]) -> list[list[int]]:
    return [reference(model, BY_NAME[n], [t], [NEW])[0] for n, t in zip(names(texts), texts, strict=True)]


def test_two_nodes_serve_and_skip(checkpoint: Any, fleet: Fleet):
    texts = prompts([5 + number % 17 for number in range(PROMPTS)])
    assert ask_all(fleet, texts) == expected(checkpoint[1], texts)
    for node in (0, 1):
        for _ in range(30):  # metrics are sent every few seconds
            tokens, layers = fleet.depth(node)
            if tokens:
                break
            time.sleep(1)
        assert 0 < layers < tokens * LAYERS, node


def test_requests_go_on_when_a_node_is_lost(checkpoint: Any, fleet: Fleet):
    texts, lost = prompts([5 + number % 17 for number in range(PROMPTS)], seed=2), Event()

    def keep_asking() -> list[list[list[int]]]:
        rounds = [ask_all(fleet, texts)]
        while not lost.is_set():
            rounds.append(ask_all(fleet, texts))
        return [*rounds, ask_all(fleet, texts)]

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(keep_asking)
        time.sleep(1)
        fleet.cluster.remove_node(fleet.second, allow_graceful=False)
        lost.set()
        rounds = running.result(timeout=180)
    assert rounds == [expected(checkpoint[1], texts)] * len(rounds)
