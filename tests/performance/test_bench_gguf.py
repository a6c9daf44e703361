"""The same weights for llama.cpp: the file we write, read back by transformers and run by llama.cpp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skipdecode import Schedule
from skipdecode.engine import Request
from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.performance.bench.gguf_file import KINDS, write_gguf
from skipdecode.performance.bench.measure import measure
from skipdecode.performance.bench.peers import Rows, make_peer
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.geometry import ModelGeometry
from tiny import LAYERS, tiny_model

PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128},  # what transformers' GGUF reader takes it to be
}
BYTES = {"bf16": 2, "f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32}
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")


def plain_model(kind: str) -> Any:
    return tiny_model(kind, **PLAIN[kind])


@pytest.mark.parametrize("family", PLAIN)
def test_transformers_reads_the_file_as_the_same_model(family: str, tmp_path: Path):
    model = plain_model(family)
    write_gguf(model, tmp_path / "model.gguf", "f16")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, model(ids).logits, atol=0.05, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_those_of_the_weights_in_the_file(kind: str, tmp_path: Path):
    model = tiny_model("llama", intermediate_size=64, vocab_size=128)
    sizes = write_gguf(model, tmp_path / "model.gguf", kind)
    geometry = ModelGeometry.from_config(model.config)
    norms = 2 * 32
    assert sizes.layer == pytest.approx((geometry.layer_params - norms) * BYTES[kind] + 4 * norms)
    outer = BYTES["q8_0"] if kind.startswith("q4") else BYTES[kind]
    assert sizes.head == pytest.approx((geometry.head_params - 32) * outer + 4 * 32)
    assert (tmp_path / "model.gguf").stat().st_size > LAYERS * sizes.layer + sizes.head


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {}),
        ("mistral", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_what_llama_cpp_would_run_otherwise_is_refused(family: str, changes: dict[str, Any], tmp_path: Path):
    with pytest.raises(UsageError, match=r"cannot be written for llama\.cpp here"):
        write_gguf(tiny_model(family, **changes), tmp_path / "model.gguf", "f16")


def test_without_llama_cpp_the_extra_is_named(monkeypatch: Any):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"skipdecode\[llama-cpp\]"):
        make_peer("llama.cpp-q8_0", tiny_model("llama"))


@needs_llama_cpp
@pytest.mark.parametrize("family", PLAIN)
def test_llama_cpp_says_what_transformers_says_for_every_row_of_a_batch(family: str):
    model = plain_model(family)
    peer = make_peer("llama.cpp-f16", model)
    prompts = [(7, 8), (9, 3), (50, 4)]
    engine = peer.engine(Schedule.full(LAYERS), Rows(3, 2, 12))
    expected = model.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=False)[:, 2:].tolist()
    for _ in range(2):  # the second time behind the prompts that the cache holds
        assert [row.tokens for row in engine.decode([Request(prompt, 6) for prompt in prompts])] == expected
    peer.close()


@needs_llama_cpp
def test_rows_of_llama_cpp_count_the_bytes_of_their_type():
    model = tiny_model("llama")
    peers = [make_peer(name, model) for name in ("fast", "llama.cpp-bf16", "llama.cpp-q4_1")]
    rows = measure(peers, Workload((2,), (6,), 5, (2.0,), 1), LAYERS, torch.device("cpu"))["rows"]
    assert [(r["engine"], r["weights"], r["nominal_speedup"]) for r in rows] == [
        ("fast", "float32", 1),
        ("llama.cpp-bf16", "bf16", 1),
        ("llama.cpp-q4_1", "q4_1", 1),
        ("fast", "float32", 2),
    ]
    full, half, quarter = (r["bytes_per_step"] for r in rows[:3])
    assert half / full == pytest.approx(1 / 2, rel=0.05)
    assert quarter / full < 0.3
    assert peers[2].reads(2).step_seconds(LAYERS, 9) < peers[0].reads(2).step_seconds(LAYERS, 9)
    for peer in peers:
        assert peer.decode_seconds(Schedule.full(LAYERS), Rows(2, 6, 5)) > 0
        peer.close()
