"""What only a CUDA device can show: transformers' path decodes there, fits are made, trained and used there, and the
fast engine refuses with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from skipdecode import Schedule, attach
from skipdecode.cli import main
from skipdecode.engine import GatedEngine, Request
from textgen_tools import save_tiny_model
from tiny import LAYERS, tiny_model
from tuning_data import records, save_model, write_jsonl

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NEW = 20
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 15, 16, 17)]
LINEAR = Schedule.from_speedup(LAYERS, 2, NEW)


@pytest.mark.parametrize("family", ["gemma3_text", "llama", "opt"])
def test_engine_gives_the_tokens_of_generate_under_attach(family: str):
    model = tiny_model(family).cuda()
    rows = GatedEngine(model, LINEAR).decode([Request(p, NEW) for p in PROMPTS])
    with attach(model, LINEAR):
        for prompt, row in zip(PROMPTS, rows, strict=True):
            ids = torch.tensor([prompt], device="cuda")
            assert row.tokens == model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()


def test_verbs_take_transformers_path(tmp_path: Any, capsys: Any):
    model = save_tiny_model(tmp_path)
    generate = ["generate", model, "one", "--device", "cuda", "--max-new-tokens", "8"]
    assert main(generate) == 0
    assert "decoding through transformers: the fast engine runs on CPUs" in capsys.readouterr().err
    assert main([*generate, "--engine", "fast"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("give --engine auto")


def test_prepare_fits_tunes_and_evaluates(tmp_path: Path, capsys: Any):
    save_model(tmp_path / "model")
    for name, count in (("train", 24), ("dev", 8)):
        write_jsonl(tmp_path / f"{name}.jsonl", records(count))
    files = [f"--{name}={tmp_path / name}.jsonl" for name in ("train", "dev")]
    form = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref"]
    rest = ["--target-speedup", "1.3", "--minutes", "0.5", "--fit-rank", "4", "--out", str(tmp_path / "out"), "--json"]
    assert main(["prepare", str(tmp_path / "model"), *files, *form, *rest]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dev_loss"]
    assert {row["minutes"] for row in found["rows"]} == {0.0, 0.5}
