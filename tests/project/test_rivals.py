"""Other engines beside the package's own in `benchmarks/rivals.py`: the same tokens, and the bytes that they read."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from skipdecode import Schedule
from skipdecode.engine import Request
from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.performance.bench.measure import measure, step_reads
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.timing import Shape, step_seconds
from tiny import LAYERS, tiny_model

PLACE = Path(__file__).parents[2] / "benchmarks" / "rivals.py"
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128},
}
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [11, 12, 13, 14]]
needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")


@pytest.fixture(scope="module")
def rivals() -> Any:
    spec = importlib.util.spec_from_file_location("rivals", PLACE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rivals"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("early", UsageError, "engine 'early' is not known"),
        ("vllm", UsageError, "needs vLLM, which is not installed"),
        ("llama.cpp-q8_0", MissingExtraError, r"skipdecode\[llama-cpp\]"),
    ],
)
def test_engines_that_cannot_run_say_why(rivals: Any, monkeypatch: Any, name: str, error: Any, message: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=message):
        rivals.open_rival(name, tiny_model("llama"))


@pytest.mark.parametrize("name", ["prompt-lookup", "early-exit"])
def test_drafting_is_lossless_and_counts_its_drafts(rivals: Any, name: str):
    model = tiny_model("llama")
    backend, full = rivals.open_rival(name, model), rivals.open_rival("transformers", model)
    for prompt in PROMPTS:
        request = [Request(tuple(prompt), 12)]
        drafting, plain = backend.engine(max_rows=1), full.engine(max_rows=1)
        assert [s.tokens for s in drafting.decode(request)] == [s.tokens for s in plain.decode(request)]
        # Of a random model most drafts of few layers are wrong: they cost more layers than full depth.
        assert drafting.stats.token_layers > (plain.stats.token_layers if name == "early-exit" else 0)
    with pytest.raises(UsageError, match="one sequence at a time"):
        backend.engine(max_rows=2)


@needs_llama_cpp
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_says_what_transformers_says_for_every_sequence_of_a_batch(rivals: Any, family: str):
    model = tiny_model(family, **FAMILIES[family])
    backend = rivals.open_rival("llama.cpp-f16", model)
    prompts = [(7, 8), (9, 3), (50, 4)]
    expected = model.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=False)[:, 2:].tolist()
    engine = backend.engine(max_rows=3)
    for _ in range(2):  # the second time behind the prompts that the cache holds
        assert [row.tokens for row in engine.decode([Request(prompt, 6) for prompt in prompts])] == expected
    backend.close()


@needs_llama_cpp
def test_llama_cpp_is_measured_with_the_bytes_of_its_type(rivals: Any):
    model = tiny_model("llama")
    backends = [rivals.open_rival(name, model) for name in ("fast", "llama.cpp-bf16", "llama.cpp-q4_1")]
    rows = measure(backends, Workload((2,), (6,), 5, (2.0,), 1))["rows"]
    assert [(r["engine"], r["weights"], r["nominal_speedup"]) for r in rows] == [
        ("fast", "float32", 1),
        ("llama.cpp-bf16", "bf16", 1),
        ("llama.cpp-q4_1", "q4_1", 1),
        ("fast", "float32", 2),
    ]
    whole, half, quarter = (r["bytes_per_step"] for r in rows[:3])
    assert half / whole == pytest.approx(1 / 2, rel=0.05)
    assert quarter / whole < 0.3
    reads = [step_reads(b, ModelGeometry.from_config(model.config, 4), 2).step_seconds(LAYERS, 9) for b in backends]
    assert reads[2] < reads[0]
    for backend in backends:
        assert sum(step_seconds(backend, Schedule.full(LAYERS), Shape(2, 6, 5))) > 0
        backend.close()
