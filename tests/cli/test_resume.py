"""`skipdecode generate` stopped in the middle goes on without losing or redoing rows, and with what it began with."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from checkpoints import edit_json, save_adapter
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.evaluation.metrics import METRICS
from skipdecode.generation.output_files import open_writer
from textgen_tools import command, log_entries, read_rows, save_tiny_model, subprocess_environment, write_rows
from tiny import LAYERS, tiny_model
from tuning_data import records, write_jsonl

# More than a window of 64 batches.
MANY = [{"id": i, "prompt": "row " * random.Random(i).randint(1, 8) + str(i)} for i in range(320)]


def long_run(model_dir: str, data: str, out: Path, *more: str) -> list[str]:
    options = ["--input", data, "--output", str(out), "--max-new-tokens", "24", "--batch-size", "4"]
    return ["generate", model_dir, *options, "--schedule", "2x", "--temperature", "0.8", "--seed", "5", *more]


def stop_in_the_middle(arguments: list[str], partial: Path, signal_number: int) -> subprocess.Popen[str]:
    """Start, wait until some rows are there, send the signal; returns the process when it has ended."""
    # A row at a time, so that it is not done before the signal comes, even where the machine has other work.
    slowly = command(*arguments, "--batch-size", "1")
    process = subprocess.Popen(slowly, env=subprocess_environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not partial.exists() or len(log_entries(partial)) < 20:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal_number)
    process.wait(60)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--no-exact",)], ids=["drafts", "no drafts"])
def test_a_killed_run_goes_on_to_the_same_file(tmp_path: Path, model_dir: str, more: tuple[str, ...]):
    data = write_rows(tmp_path / "in.jsonl", MANY)
    whole, out, partial = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    assert main(long_run(model_dir, data, whole, *more)) == 0
    process = stop_in_the_middle(long_run(model_dir, data, out, *more), partial, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = len(log_entries(partial))
    assert 19 <= done < len(MANY)
    assert not out.exists()
    figures = tmp_path / "figures.json"
    assert main(long_run(model_dir, data, out, *more, "--summary", str(figures), "--batch-size", "16")) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    summary = json.loads(figures.read_text())["summary"]
    assert (summary["rows"], summary["rows_resumed"]) == (len(MANY), done)
    assert summary["new_tokens"] <= 24 * (len(MANY) - done)


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_and_says_how_to_go_on(tmp_path: Path, model_dir: str, capsys: Any):
    data = write_rows(tmp_path / "in.jsonl", MANY)
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    process = stop_in_the_middle(long_run(model_dir, data, out), partial, signal.SIGINT)
    assert process.returncode == 130
    assert process.stderr is not None
    told = process.stderr.read()
    done = len(log_entries(partial))
    assert f"interrupted: {done} finished rows are kept in {partial}; the same command goes on" in told
    assert "Traceback" not in told
    # Rows of other weights are not gone on with, under the same name.
    weights = Path(model_dir) / "model.safetensors"
    before = weights.read_bytes()
    tiny_model("llama", seed=1, vocab_size=259).save_pretrained(tmp_path / "other")
    weights.write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    assert main(long_run(model_dir, data, out)) == 2
    assert "model_weights" in capsys.readouterr().err.splitlines()[-1]
    weights.write_bytes(before)
    assert main(long_run(model_dir, data, out)) == 0
    assert [r["id"] for r in read_rows(out)] == list(range(len(MANY)))


def test_reader_that_goes_away_ends_the_run_without_a_traceback(tmp_path: Path, model_dir: str):
    data = write_rows(tmp_path / "in.jsonl", MANY[:16])
    process = subprocess.Popen(
        command("generate", model_dir, "--input", data, "--max-new-tokens", "8"),
        env=subprocess_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(120) == 1
    assert process.stderr is not None
    printed = process.stderr.read()
    assert printed.startswith(b"skipdecode: loading ")  # before torch is imported
    assert b"Traceback" not in printed


PEAK = """
import resource, sys
from skipdecode.cli import main
code = main(sys.argv[1:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
def test_peak_memory_of_a_real_run_does_not_grow_with_the_file(tmp_path: Path, model_dir: str):
    def peak(rows: int) -> int:
        data, out = tmp_path / f"in{rows}.jsonl", tmp_path / f"out{rows}.jsonl"
        with data.open("w") as file:
            for i in range(rows):
                # 8 KiB a row that are not prompt: 80 MB of file at 10,000 rows.
                prompt = "row " * random.Random(i).randint(1, 16)
                file.write(json.dumps({"id": f"r{i}", "prompt": prompt, "note": "x" * 8192}) + "\n")
        options = ["--input", str(data), "--output", str(out), "--max-new-tokens", "3", "--batch-size", "8"]
        done = subprocess.run(
            [sys.executable, "-c", PEAK, "generate", model_dir, *options, "--schedule", "2x"],
            env=subprocess_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert [r["id"] for r in read_rows(out)] == [f"r{i}" for i in range(rows)]
        return int(done.stdout.split()[-1])

    few, many = peak(1000), peak(10_000)
    assert many - few < 12 * 1024  # KiB


TASK = 'name: t\nprompt: "{colour} {thing}\\n"\nreferences: [ref]\nmetrics: [chrf]\nmax_new_tokens: 2\nchat: true\n'


def in_json(file: str, **changes: Any) -> Callable[[Path], None]:
    return lambda place: edit_json(place / file, **changes)


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
    "--steps 1 --batch-size 2 --bad-records skip",
    "eval": "eval adapter --data in.jsonl --task t.yaml --schedule s.json --metrics rougeL --max-new-tokens 6 "
    "--resamples 20 --no-teacher-forced --out out",
}


def prepare(place: Path) -> None:
    save_tiny_model(place / "base", context=256)
    save_adapter(place / "adapter", "base")
    write_jsonl(place / "in.jsonl", records(6))
    (place / "t.yaml").write_text(TASK)
    Schedule.constant(LAYERS, 5).save(place / "s.json")


def ctrl_c(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def interrupted(verb: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run as a kill would have left it; returns the command that goes on."""
    monkeypatch.chdir(place)
    words = COMMANDS[verb].split()
    if verb == "eval":  # all texts are there, and none is scored
        monkeypatch.setattr(METRICS["rougeL"], "statistics", ctrl_c)
        assert main(words) == 130
        return words
    if verb == "generate":
        assert main([*words, "--summary", "figures.json"]) == 0
        settings = json.loads(Path("figures.json").read_text())["settings"]
        with closing(open_writer("out.jsonl", settings)) as writer:
            writer.put(0, {"id": "r0", "error": "x"}, bad=True)
        Path("out.jsonl").unlink()
        return words
    assert main(words) == 0
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
def test_an_edited_file(verb: str, what: str, begun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    before, words = begun[verb]
    place = tmp_path / "copy"
    shutil.copytree(before, place)
    monkeypatch.chdir(place)
    edit, told = CHECKPOINT[what]
    edit(place)
    assert main(words) == 2
    if verb != "eval":  # which names the command
        assert told in capsys.readouterr().err
    elif main([*words, "--overwrite"]) != 2:  # begun anew
        assert main([*words, "--out", "fresh"]) == 0
        assert Path("out/outputs.jsonl").read_bytes() == Path("fresh/outputs.jsonl").read_bytes()


def test_the_same_files_go_on(begun: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, words = begun["generate"]
    monkeypatch.chdir(place)
    assert main([*words, "--output", "other.jsonl"]) == 0
    shutil.copy("out.jsonl.partial", "again.jsonl.partial")
    assert main([*words, "--output", "again.jsonl"]) == 1  # a record was bad
    rows = [json.loads(line) for line in Path("again.jsonl").read_text().splitlines()]
    assert rows[0] == {"id": "r0", "error": "x"}
    assert rows[1:] == [json.loads(line) for line in Path("other.jsonl").read_text().splitlines()][1:]


# Ends itself by SIGTERM in the middle of the work.
TERMINATED = """
import os, signal, sys
from skipdecode.cli import main
import skipdecode.common.resume as resume
import skipdecode.learning.checkpoint as checkpoint
def terminated(write):
    def writes(self, *args):
        write(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)
    return writes
resume.ResumeLog.put = terminated(resume.ResumeLog.put)
checkpoint.RunLog.write = terminated(checkpoint.RunLog.write)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("verb", COMMANDS)
def test_sigterm_is_one_line_that_names_how_to_go_on(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prepare(tmp_path)
    words = COMMANDS[verb].split()
    run = {"cwd": tmp_path, "env": subprocess_environment(), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", TERMINATED, *words], **run)
    assert done.returncode == 143, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("skipdecode: terminated")
    assert "the same command" in last
    assert "Traceback" not in done.stderr
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
