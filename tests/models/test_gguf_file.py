"""The same weights for llama.cpp: the file that is written, read back by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skipdecode.errors import UsageError
from skipdecode.models.loading.gguf_file import write_gguf
from tiny import tiny_model

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
