"""A run goes on only with what it was begun with: any file that its result depends on, edited, is a refusal."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import save_adapter
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.common.jsonl import json_line
from skipdecode.evaluation.metrics import METRICS
from textgen_tools import save_tiny_model
from tiny import LAYERS
from tuning_data import records, write_jsonl

TASK = 'name: t\nprompt: "{colour} {thing}\\n"\nreferences: [ref]\nmetrics: [chrf]\nmax_new_tokens: 2\nchat: true\n'


def in_json(file: str, **changes: Any) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        path = place / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def in_text(file: str, before: str, after: str) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        path = place / file
        text, times = path.read_text(), path.stat()
        assert before in text
        path.write_text(text.replace(before, after, 1))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return edit


def in_weights(file: str, key: str) -> Callable[[Path], None]:
    def edit(place: Path) -> None:
        tensors = load_file(place / file)
        name = next(name for name in tensors if key in name)
        tensors[name] = tensors[name] * 1.5
        save_file(tensors, place / file, metadata={"format": "pt"})

    return edit


CHECKPOINT: dict[str, tuple[Callable[[Path], None], str]] = {
    "chat template": (in_text("base/chat_template.jinja", "<assistant>", "<bot>"), "chat_template"),
    "tokenizer": (in_json("base/tokenizer.json", normalizer={"type": "Lowercase"}), "tokenizer"),
    "end token": (in_json("base/generation_config.json", eos_token_id=7), "end_tokens"),
    "config": (in_json("base/config.json", rms_norm_eps=0.5), "config"),
    "adapter": (in_weights("adapter/adapter_model.safetensors", "layers.5"), "adapter"),
    "input": (in_text("in.jsonl", "a ", "b "), "sha256"),
    "task": (in_text("t.yaml", "{colour} {thing}", "{thing} {colour}"), "template"),
    "schedule": (in_json("s.json", budgets=[6]), "budgets"),
}
COMMANDS = {
    "generate": "generate adapter --input in.jsonl --task t.yaml --schedule s.json --max-new-tokens 2 "
    "--output out.jsonl",
    "tune": "tune adapter --full --train in.jsonl --dev in.jsonl --task t.yaml --schedule s.json --out out "
    "--steps 1 --batch-size 2 --bad-records skip --resume",
}


def prepare(place: Path) -> None:
    save_tiny_model(place / "base", context=256)
    save_adapter(place / "adapter", "base")
    write_jsonl(place / "in.jsonl", records(6))
    (place / "t.yaml").write_text(TASK)
    Schedule.constant(LAYERS, 5).save(place / "s.json")


def interrupted(verb: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run as a kill would have left it; returns the command that goes on."""
    monkeypatch.chdir(place)
    words = COMMANDS[verb].split()
    if verb == "generate":
        assert main([*words, "--summary", "figures.json"]) == 0
        settings = json.loads(Path("figures.json").read_text())["settings"]
        Path("out.jsonl.partial").write_bytes(
            json_line({"skipdecode_partial": 1, "settings": settings}) + b'0 ok\t{"id": "r0", "text": ""}\n'
        )
        Path("out.jsonl").unlink()
        return words
    assert main(words) == 0
    if verb == "tune":
        in_json("out/recipe.json", result=None)(place)
    return words


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    found = {}
    for verb in COMMANDS:
        place = tmp_path_factory.mktemp(verb)
        prepare(place)
        with pytest.MonkeyPatch.context() as patch:
            found[verb] = place, interrupted(verb, place, patch)
    return found


@pytest.mark.parametrize("what", CHECKPOINT)
@pytest.mark.parametrize("verb", COMMANDS)
def test_an_edited_file_is_a_refusal_that_names_what_changed(
    verb: str, what: str, begun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    before, words = begun[verb]
    place = tmp_path / "copy"
    shutil.copytree(before, place)
    monkeypatch.chdir(place)
    edit, told = CHECKPOINT[what]
    edit(place)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert told in printed


def test_the_same_files_go_on(begun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, words = begun["generate"]
    monkeypatch.chdir(place)
    assert main([*words, "--output", "other.jsonl"]) == 0
    shutil.copy("out.jsonl.partial", "again.jsonl.partial")
    assert main([*words, "--output", "again.jsonl"]) == 0
    rows = [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()]
    assert rows[0] == {"id": "r0", "text": ""}
    assert rows[1:] == [json.loads(line) for line in Path("other.jsonl").read_text().splitlines()][1:]


@pytest.fixture(scope="module")
def begun_eval(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """An evaluation that was interrupted when all texts were there and none was scored."""

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    place = tmp_path_factory.mktemp("eval")
    prepare(place)
    command = "eval adapter --data in.jsonl --task t.yaml --schedule s.json --metrics rougeL --max-new-tokens 6"
    words = [*command.split(), "--resamples", "20", "--no-teacher-forced"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(METRICS["rougeL"], "statistics", interrupted)
        assert main([*words, "--out", "out"]) == 130
    return place, words


@pytest.mark.parametrize("what", CHECKPOINT)
def test_an_edited_file_is_a_refusal_or_a_new_start_of_eval(
    what: str, begun_eval: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before, words = begun_eval
    place = tmp_path / "copy"
    shutil.copytree(before, place)
    monkeypatch.chdir(place)
    CHECKPOINT[what][0](place)
    if main([*words, "--out", "out"]) != 2:
        assert main([*words, "--out", "fresh"]) == 0
        assert Path("out/outputs.jsonl").read_bytes() == Path("fresh/outputs.jsonl").read_bytes()
