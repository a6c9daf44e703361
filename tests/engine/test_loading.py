"""The type that a model is loaded in, by the engine that will run it and the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import skipdecode
from checkpoints import save_adapter, save_checkpoint
from skipdecode.engine import loading
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.beside import add_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPDECODE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=[True, False], ids=["bf16 instructions", "none"])
def in_hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU multiplies bf16."""
    monkeypatch.setattr(loading, "multiplies_bf16", lambda device: request.param)
    return bool(request.param)


@pytest.fixture
def stored(tmp_path: Path) -> str:
    """A checkpoint in bf16."""
    save_checkpoint(tmp_path / "stored", dtype=torch.bfloat16)
    return str(tmp_path / "stored")


def dtype_of(name: str, **options: str) -> torch.dtype:
    return skipdecode.load(name, device="cpu", **options).model.dtype


def test_auto_is_bf16_for_the_fast_engine(tmp_path: Path, stored: str, in_hardware: bool) -> None:
    dtype = torch.bfloat16
    add_model(smollm2.NAME, lambda folder: save_checkpoint(folder) and "test")
    save_adapter(tmp_path / "adapter", smollm2.NAME)
    for name in (smollm2.NAME, str(tmp_path / "adapter"), stored):
        assert dtype_of(name) == skipdecode.LLM(name, device="cpu").loaded.model.dtype == dtype
        assert dtype_of(name, dtype="float32") == torch.float32
        assert dtype_of(name, dtype="bfloat16") == torch.bfloat16
    # So it is for whole weights that were tuned in bf16, which are stored in fp32, and for adapters on them.
    results = {
        "bf16": {"precision": "bf16"},
        "fp32": {"precision": "fp32"},
        "unfinished": None,
        "merged": {"precision": "bf16"},
    }
    for folder, result in results.items():
        save_checkpoint(tmp_path / folder)
        recipe = {"options": {"full": folder != "merged"}, "result": result}
        (tmp_path / folder / "recipe.json").write_text(json.dumps(recipe))
        assert dtype_of(str(tmp_path / folder)) == (dtype if folder == "bf16" else torch.float32)
    save_adapter(tmp_path / "on-tuned", str(tmp_path / "bf16"))
    assert dtype_of(str(tmp_path / "on-tuned")) == dtype


def test_the_transformers_engine_takes_fp32_on_a_cpu_without_bf16(stored: str, in_hardware: bool) -> None:
    assert dtype_of(stored, engine="transformers") == (torch.bfloat16 if in_hardware else torch.float32)
    assert dtype_of(stored, engine="fast") == torch.bfloat16
    save_checkpoint(Path(stored), dtype=torch.float16)
    assert dtype_of(stored, engine="transformers") == torch.float16
