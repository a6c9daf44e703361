"""What llama.cpp reads in a GGUF file, from the package cyllama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def _opened(file: Path) -> tuple[Any, Any]:
    binding = pytest.importorskip("cyllama.llama.llama_cpp")
    options = binding.LlamaModelParams()
    options.n_gpu_layers = 0
    return binding, binding.LlamaModel(str(file), options)


def likeliest(file: Path, ids: list[int]) -> list[int]:
    """The most probable token after each of `ids`, of which there are 128 at most."""
    binding, model = _opened(file)
    context = binding.LlamaContextParams()
    context.n_ctx = context.n_batch = context.n_ubatch = 128
    running = binding.LlamaContext(model, context)
    batch = binding.LlamaBatch(n_tokens=128, embd=0, n_seq_max=1)
    batch.set_batch(ids, 0, True)
    running.decode(batch)
    sampler = binding.LlamaSampler(binding.LlamaSamplerChainParams())
    sampler.add_greedy()
    return [sampler.sample(running, i) for i in range(len(ids))]


def llama_model(file: Path) -> Any:
    """The model, which must live as long as its tokenizer (`get_vocab`) is used."""
    return _opened(file)[1]
