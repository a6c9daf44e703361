"""Pipes, FIFOs and standard input are read once, and whole, by every verb that reads records."""

from __future__ import annotations

import json
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import skipdecode
from skipdecode.cli import main
from textgen_tools import save_tiny_model, stdin_of
from tuning_data import records, save_model, write_jsonl

COUNT = 40
# More than a pipe, or a buffer of the reader, holds.
WIDE = [record | {"note": "x" * 4096} for record in records(COUNT)]
FORM = "--prompt-template {colour} --response-field ref"
TUNE = f"{FORM} --full --steps 1 --batch-size 2 --schedule 2x".split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@contextmanager
def fifo(path: Path, content: bytes) -> Any:
    os.mkfifo(path)
    feeder = threading.Thread(target=path.write_bytes, args=(content,), daemon=True)
    feeder.start()
    yield str(path)
    feeder.join(10)


def test_tune_reads_pipes_once_and_whole(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch):
    content = write_jsonl(tmp_path / "train.jsonl", WIDE).read_bytes()
    stdin_of(monkeypatch, write_jsonl(tmp_path / "dev.jsonl", records(5)).read_bytes())
    out = tmp_path / "out"
    with fifo(tmp_path / "pipe", content) as train:
        assert main(["tune", model, "--train", train, "--dev", "-", "--out", str(out), *TUNE]) == 0
    data = json.loads((out / "recipe.json").read_text())["data"]
    assert (data["train"]["records"], data["dev"]["records"]) == (COUNT, 5)
    again = tmp_path / "again"
    files = ["--train", str(tmp_path / "train.jsonl"), "--dev", str(tmp_path / "dev.jsonl")]
    assert main(["tune", model, *files, "--out", str(again), *TUNE]) == 0
    digests = json.loads((again / "recipe.json").read_text())["data"]
    assert [digests[part]["sha256"] for part in data] == [data[part]["sha256"] for part in data]


def test_calibrate_and_eval_read_a_pipe_whole(tmp_path: Path, model: str):
    content = write_jsonl(tmp_path / "in.jsonl", WIDE).read_bytes()
    form = {"prompt_template": "{colour}", "response_field": "ref"}
    options = {"nominal_speedup": 2, "records": COUNT - 5}
    with fifo(tmp_path / "one", content) as data:
        assert skipdecode.calibrate(model, data, **form, **options).document["records"] == COUNT - 5
    task = tmp_path / "t.yaml"
    task.write_text('name: t\nprompt: "{colour}"\nreferences: [ref]\nmetrics: [chrf]\nmax_new_tokens: 2\n')
    with fifo(tmp_path / "two", content) as data:
        words = ["eval", model, "--task", str(task), "--data", data, "--out", str(tmp_path / "run")]
        assert main([*words, "--schedule", "2x", "--no-teacher-forced"]) == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["n"] == COUNT


def test_own_prompts_come_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    model = save_tiny_model(tmp_path / "model")
    own = ["--self", "--self-tokens", "8", "--full"]
    for verb, more in (("tune", own), ("eval", ["--methods", "2x", "--max-new-tokens", "8"])):
        stdin_of(monkeypatch, "".join(f"prompt {i}\n" for i in range(6)).encode())
        main([verb, model, "--prompts", "-", *more, "--out", str(tmp_path / verb)])
    assert "answers: " in capsys.readouterr().err
    assert json.loads((tmp_path / "eval" / "run.json").read_text())["n"] == 6


def test_streams_read_twice_are_refused(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    stdin_of(monkeypatch, b"{}\n")
    assert main(["tune", model, "--train", "-", "--dev", "-", "--out", str(tmp_path / "out"), *TUNE]) == 2
    assert "- is given twice and can be read only once" in capsys.readouterr().err
    assert main(["tune", model, "--train", "-", "--out", str(tmp_path / "out")]) == 2
    assert "- is read once, so its shape is not found out: give one of --task" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["tune", model, "--train", "-", "--out", str(tmp_path / "out"), *TUNE]) == 2
    assert "2 processes would read it" in capsys.readouterr().err
