"""`skipdecode generate` stopped in the middle goes on without losing or redoing rows; its memory stays the same."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skipdecode.cli import main
from textgen_tools import command, read_rows, save_tiny_model, subprocess_environment, write_rows
from tiny import tiny_model

# More than a window of 64 batches.
MANY = [{"id": i, "prompt": "row " * random.Random(i).randint(1, 8) + str(i)} for i in range(320)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def long_run(model_dir: str, data: str, out: Path, *more: str) -> list[str]:
    options = ["--input", data, "--output", str(out), "--max-new-tokens", "24", "--batch-size", "4"]
    return ["generate", model_dir, *options, "--schedule", "2x", "--temperature", "0.8", "--seed", "5", *more]


def stop_in_the_middle(arguments: list[str], partial: Path, signal_number: int) -> subprocess.Popen[str]:
    """Start, wait until some rows are there, send the signal; returns the process when it has ended."""
    # A row at a time, so that it is not done before the signal comes, even where the machine has other work.
    slowly = command(*arguments, "--batch-size", "1")
    process = subprocess.Popen(slowly, env=subprocess_environment(), stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not partial.exists() or partial.read_bytes().count(b"\n") < 20:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal_number)
    process.wait(60)
    return process


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--no-exact",)], ids=["drafts", "no drafts"])
def test_killed_run_goes_on_to_the_same_file_without_redoing_rows(
    tmp_path: Path, model_dir: str, more: tuple[str, ...]
):
    data = write_rows(tmp_path / "in.jsonl", MANY)
    whole, out, partial = tmp_path / "whole.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    assert main(long_run(model_dir, data, whole, *more)) == 0
    process = stop_in_the_middle(long_run(model_dir, data, out, *more), partial, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    done = partial.read_bytes().count(b"\n") - 1
    assert 19 <= done < len(MANY)
    assert not out.exists()
    with partial.open("ab") as file:
        file.write(b'319 ok\t{"id": 319, "te')
    figures = tmp_path / "figures.json"
    assert main(long_run(model_dir, data, out, *more, "--summary", str(figures), "--batch-size", "16")) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert not partial.exists()
    summary = json.loads(figures.read_text())["summary"]
    assert (summary["rows"], summary["rows_resumed"]) == (len(MANY), done)
    assert summary["new_tokens"] <= 24 * (len(MANY) - done)


@pytest.mark.slow
def test_ctrl_c_keeps_the_rows_and_says_how_to_go_on(
    tmp_path: Path, model_dir: str, capsys: pytest.CaptureFixture[str]
):
    data = write_rows(tmp_path / "in.jsonl", MANY)
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    process = stop_in_the_middle(long_run(model_dir, data, out), partial, signal.SIGINT)
    assert process.returncode == 130
    assert process.stderr is not None
    told = process.stderr.read()
    done = partial.read_bytes().count(b"\n") - 1
    assert f"interrupted: {done} finished rows are kept in {partial}; the same command goes on" in told
    assert "Traceback" not in told
    assert main([*long_run(model_dir, data, out), "--seed", "6"]) == 2
    assert "seed: 5 then, 6 now" in capsys.readouterr().err.splitlines()[-1]
    # Nor are rows of other weights gone on with, under the same name.
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
    assert b"Traceback" not in process.stderr.read()


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
