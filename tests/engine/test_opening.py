"""Engines by name: the fast one gives transformers' tokens; models it does not cover fall back and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from engine_tools import decode
from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine.kernels import build
from skipdecode.engine.opening import open_engines
from skipdecode.errors import UsageError
from textgen_tools import read_rows, save_tiny_model, write_rows
from tiny import LAYERS, tiny_model

PROMPTS = [[5, 6, 7, 8], [9], list(range(3, 40)), [11, 12, 13, 14, 15, 16, 17]]
PAPER = Schedule.from_speedup(LAYERS, 2, 20)
FULL = Schedule.full(LAYERS)


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
    build.load_library.cache_clear()
    try:
        engine, (told,) = notes_of(tiny_model("llama"), "auto")
        assert engine == "transformers"
        assert told.startswith("decoding through transformers, several times slower than the fast engine: no C++ comp")
        assert "CXX" in told
        with pytest.raises(UsageError, match=r"the engine fast cannot run .*: no C\+\+ compiler was found.*CXX"):
            notes_of(tiny_model("llama"), "fast")
    finally:
        build.load_library.cache_clear()


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
