"""Engines by name: the fast one gives transformers' tokens, others fall back and say so; the type of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

import skipdecode
from checkpoints import save_adapter, save_checkpoint
from engine_tools import decode
from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine import opening
from skipdecode.engine.kernels import library as kernel_library
from skipdecode.engine.opening import open_engines
from skipdecode.errors import UsageError
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.store import add_model
from textgen_tools import read_rows, save_tiny_model, write_rows
from tiny import LAYERS, tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPTS = [[5, 6, 7, 8], [9], list(range(3, 40)), [11, 12, 13, 14, 15, 16, 17]]
PAPER = Schedule.from_speedup(LAYERS, 2, 20)


def notes_of(model: Any, engine: str) -> tuple[str, list[str]]:
    notes: list[str] = []
    return open_engines(model, engine, notes.append).name, notes


def test_unsupported_family_falls_back_with_one_note():
    engine, notes = notes_of(tiny_model("bloom"), "auto")
    assert engine == "transformers"
    assert len(notes) == 1
    assert "no fast path for model type 'bloom'" in notes[0]
    assert notes_of(tiny_model("bloom"), "transformers") == ("transformers", [])
    with pytest.raises(UsageError, match=r"the engine fast cannot run .*: no fast path.*give the engine auto"):
        notes_of(tiny_model("bloom"), "fast")


def test_without_a_compiler_auto_goes_through_transformers_and_hints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    kernel_library.load_library.cache_clear()
    try:
        engine, (told,) = notes_of(tiny_model("llama"), "auto")
        assert engine == "transformers"
        assert told.startswith("decoding through transformers, several times slower than the fast engine: no C++ comp")
        assert "CXX" in told
        with pytest.raises(UsageError, match=r"the engine fast cannot run .*: no C\+\+ compiler was found.*CXX"):
            notes_of(tiny_model("llama"), "fast")
        with pytest.raises(UsageError, match=r"quantization int8 needs the fast engine.*no C\+\+ compiler"):
            open_engines(tiny_model("llama"), "auto", print, "int8")
    finally:
        kernel_library.load_library.cache_clear()


def test_adapter_is_merged_into_a_copy():
    kernels_or_skip()
    base = tiny_model("llama", vocab_size=259)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.eval()
    notes: list[str] = []
    texts = []
    for engine in ("auto", "transformers"):
        source = open_engines(model, engine, notes.append)
        assert source.name == ("fast" if engine == "auto" else engine)
        texts.append(decode(source.engine(PAPER), PROMPTS, 10))
    assert texts[0] == texts[1]
    assert not notes
    assert any("lora" in name for name, _ in model.named_parameters())


def test_generate_gives_the_same_rows_on_both_engines_and_compares(tmp_path: Path, capsys: Any):
    kernels_or_skip()
    model = save_tiny_model(tmp_path / "model")
    data = write_rows(tmp_path / "in.jsonl", [{"id": i, "prompt": "word " * (i + 1)} for i in range(5)])
    rows = []
    for engine in ("fast", "transformers"):
        out, figures = tmp_path / f"{engine}.jsonl", tmp_path / f"{engine}.json"
        arguments = ["--input", data, "--output", str(out), "--summary", str(figures), "--max-new-tokens", "8"]
        more = ["--batch-size", "3", "--schedule", "2x", "--compare", "--engine", engine]
        assert main(["generate", model, *arguments, *more]) == 0
        rows.append(read_rows(out))
        document = json.loads(figures.read_text())
        assert document["settings"]["engine"] == engine
        assert document["summary"]["comparison"]["decode_speedup"] > 0
    assert rows[0] == rows[1]


@pytest.fixture(params=[True, False], ids=["bf16 instructions", "none"])
def in_hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the CPU multiplies bf16."""
    monkeypatch.setattr(opening, "multiplies_bf16", lambda device: request.param)
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
