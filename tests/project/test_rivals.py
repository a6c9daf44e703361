"""Other engines beside the package's own in `benchmarks/rivals.py`: the same tokens."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode.engine import Request
from skipdecode.errors import UsageError
from tiny import tiny_model

PLACE = Path(__file__).parents[2] / "benchmarks" / "rivals.py"
PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [11, 12, 13, 14]]


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
