"""The same weights for llama.cpp: the file that is written, read back by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skipdecode.cost.geometry import ModelGeometry
from skipdecode.errors import UsageError
from skipdecode.models.loading.gguf_file import KINDS, write_gguf
from tiny import LAYERS, tiny_model

PLAIN: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 128},  # what transformers' GGUF reader takes it to be
}
BYTES = {"bf16": 2, "f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32}


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
    assert sizes.head == pytest.approx(model.lm_head.weight.numel() * outer + 4 * 32)
    assert (tmp_path / "model.gguf").stat().st_size > LAYERS * sizes.layer + sizes.head


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("opt", {}),
        ("mistral", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_what_llama_cpp_would_run_otherwise_is_refused(family: str, changes: dict[str, Any], tmp_path: Path):
    with pytest.raises(UsageError, match=r"cannot be written for llama\.cpp here"):
        write_gguf(tiny_model(family, **changes), tmp_path / "model.gguf", "f16")
