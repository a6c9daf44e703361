"""What cannot be done as written: one line, exit code 2, before weights are read; tokens without a row in the model."""

from __future__ import annotations

import io
import json
import logging
import shlex
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from checkpoints import byte_tokenizer, save_adapter
from skipdecode import Schedule, errors
from skipdecode.cli import main
from skipdecode.common import progress
from textgen_tools import save_tiny_model, subprocess_environment
from tiny import tiny_model

RECORDS = "--train rec.jsonl --dev rec.jsonl --out new"
EVAL = "eval hollow --task e2e --data rec.jsonl --out new --metrics chrf"
NEEDED = {
    "prepare": "--self --out new",
    "generate": "x",
    "serve": "--port 0",
    "chat": "",
    "plan": "--target-speedup 2",
    "tune": f"--task e2e {RECORDS}",
    "eval": "--task e2e --data rec.jsonl --out new",
    "export": "--out new",
    "info": "",
}
WRONG = {
    # Words that are not known, and what they are like.
    "genrate": "'generate'",
    "--verison": "'--version'",
    "plan hollow --btach 2": "'--batch'",
    "generate hollow x --order 3": "unknown option --order",
    "generate hollow '--order of layers' --top-k -1": "--top-k -1",
    "generate hollow --top-k -1 -- --order": "--top-k -1",
    "tune hollow --no-train-fit": "an option of skipdecode.tune in Python",
    "plan hollow --schedule 2x --dtype bf16": "'bfloat16'",
    "plan smolm2-135m --schedule 2x": "'smollm2-135m'",
    "generate hollo x": "'hollow'",
    f"{EVAL} --metrics BLUE": "unknown metric 'BLUE' (did you mean 'bleu'?): accepted are bleu, chrf, ",
    f"{EVAL.replace('e2e', 'E2')}": "'e2e'",
    # Values and options.
    "plan hollow": "--target-speedup",
    "plan hollow --target-speedup": "--target-speedup",
    "plan": "MODEL",
    "info more": "more",
    "generate hollow x --batch-size 1.5": "--batch-size '1.5'",
    "generate hollow x --batch-size 0": "--batch-size 0 is not accepted",
    "generate hollow x --top-k 3": "or a temperature too",
    "generate hollow x --input rec.jsonl": "PROMPTS and --input exclude each other",
    "generate hollow x --field q": "PROMPTS and --prompt-field exclude each other",
    "generate hollow x --output-format text --output out.txt": "--output-format text is for standard output",
    "generate hollow x --seq-len 3": "--seq-len needs --schedule",
    "generate hollow x --seq-len 5 --schedule eight.json": "--seq-len is for a speed-up",
    "generate hollow x --stop ''": "--stop ''",
    "generate hollow x --schedule ''": "unknown schedule ''",
    "generate hollow x --quantization int8 --engine transformers": "--quantization",
    "generate hollow x --weights w8a8 --engine transformers": "--quantization w8a8",
    "generate hollow x --system '\udcff'": "--system '\\udcff'",
    "generate hollow x --prompt-template '{a}\udcff'": "--prompt-template",
    "generate hollow '\udcff'": "PROMPTS",
    "plan hollow --schedule 2x --seq-len 100000000": "1 to 32768",
    "plan hollow --schedule 2x --batch 1000 --prompt-len 1000000": "give at most 1048576",
    "generate hollow x --device gpu": "cpu, cuda",
    "generate hollow x --device cuda:99": "give cpu",
    "generate hollow x --nominal-speedup 2": "--schedule 2x",
    "plan hollow --schedule 0.5x": "a nominal speed-up of 0.5 is not accepted",
    "generate hollow ''": "no prompt of the arguments",
    "tune hollow": "--train",
    "tune --train rec.jsonl --out new": "MODEL",
    "tune hollow --train rec.jsonl": "--out",
    "prepare hollow --out new": "--train",
    "eval hollow": "--out",
    "eval": "MODEL",
    f"tune hollow {RECORDS}": "--task",
    f"tune adapter --task e2e --lora-rank 4 {RECORDS}": "--merge",
    f"tune hollow --prompt-field m --response-field ref {RECORDS}": "'m'; the record has 'mr', 'ref'",
    # Schedules and lengths that do not fit the model.
    "generate hollow x --schedule 99x": "at most 4.00",
    "generate hollow x --schedule ten.json": "10 layers",
    "generate hollow x --schedule :p9": "1 to 8",
    "chat hollow --schedule :p0-8": "0 to 7",
    "plan hollow --target-speedup 2 --prompt-layers lower": "'lower'",
    f"tune hollow --task e2e {RECORDS} --schedule 2x:p1-3": "layer 0",
    f"{EVAL} --methods 2x:p9": "1 to 8",
    f"tune hollow --task e2e {RECORDS} --schedule ten.json": "10 layers",
    f"{EVAL} --schedule ten.json": "10 layers",
    f"{EVAL} --max-new-tokens 500": "--max-new-tokens 500",
    "serve hollow --port 0 --schedule ten.json": "10 layers",
    "serve hollow --port 0 --schedule fast": "unknown schedule 'fast'",
    "serve hollow --prefix-per-key": "--prefix-per-key needs API keys",
    "serve hollow --prefix-per-key --no-prefix-cache": "--prefix-per-key",
    "serve hollow --cors http://localhost:3000/": "--cors 'http://localhost:3000/' is not accepted",
    # Files.
    "generate hollow --input nowhere.jsonl": "nowhere.jsonl",
    "generate hollow --input ''": "--input '' is not accepted: give a name",
    "generate hollow rec.jsonl": "give --input rec.jsonl",
    "generate hollow --input rec.jsonl --prompt-template '{mrr}:'": "'mrr'",
    "generate hollow x --output new.csv": "--output new.csv is written as JSON lines",
    "generate hollow --input empty.txt": "no prompts in empty.txt",
    "generate hollow --input bad.jsonl": "nothing to generate: no row of bad.jsonl can be used",
    "generate hollow x --schedule nowhere.json": "cannot read the schedule nowhere.json",
    "generate hollow x --schedule bad.jsonl": "bad.jsonl: a schedule must be JSON",
    "generate hollow x --summary /dev/full/x": "cannot write /dev/full/x",
    "generate hollow x --output rec.jsonl/x": "rec.jsonl/x",
    f"tune hollow --task e2e {RECORDS.replace('rec', 'none')}": "none.jsonl",
    "eval --compare nowhere": "nowhere",
    "plan cfg.json --schedule 2x --out .": "directory",
    f"prepare hollow --task e2e {RECORDS} --cost nowhere.json": "nowhere.json",
    "serve hollow --api-keys nowhere.txt": "nowhere.txt",
    "prepare hollow --train nowhere.jsonl --out new": "nowhere.jsonl",
    "prepare hollow --self --prompts nowhere.jsonl --out new": "nowhere.jsonl",
    "tune hollow --recipe nowhere.json --out new": "nowhere.json",
    "generate hollow x --json-schema nowhere.json": "nowhere.json",
    "generate hollow x --json-schema one.json": "one.json: oneOf constraints are not supported: give anyOf",
    "eval hollow --task jsonl --data nowhere.jsonl --out new": "nowhere.jsonl",
    **{f"{verb} nowhere {rest}": "'nowhere'" for verb, rest in NEEDED.items()},
    **{f"{verb} hollow --schedule fast {NEEDED[verb]}": "'fast'" for verb in ("generate", "chat", "tune", "export")},
}
# Found in the records, in the adapter, or by torch.
BEHIND_TORCH = (f"tune hollow {RECORDS}", "tune adapter", "tune hollow --prompt-field m", "cuda:99")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files, and a model without weights: whatever gets as far as loading them fails otherwise."""
    place = tmp_path_factory.mktemp("wrong")
    save_tiny_model(place / "hollow")
    for file in (place / "hollow").glob("*.safetensors"):
        file.unlink()
    save_adapter(place / "adapter", str(place / "hollow"))
    (place / "rec.jsonl").write_text('{"mr": "name[A]", "ref": "A."}\n')
    (place / "empty.txt").write_text("\n")
    (place / "one.json").write_text('{"oneOf": [{"type": "integer"}, {"type": "number"}]}')
    (place / "bad.jsonl").write_text("{oops\n{}\n")
    for layers, name in ((8, "eight"), (10, "ten")):
        Schedule.constant(layers, 5).save(place / f"{name}.json")
    (place / "cfg.json").write_text((place / "hollow" / "config.json").read_text())
    return place


@pytest.mark.parametrize("command", WRONG)
def test_one_line_and_exit_code_2(command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.chdir(place)
    assert main(shlex.split(command)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("skipdecode: ")
    assert printed.err.count("\n") == 1
    assert WRONG[command] in printed.err


def test_a_path_in_place_of_another_is_told(capsys: Any):
    assert main(["generate", "nowhere", "--input", "a", "--input", "b"]) == 2
    assert "--input is given twice: b counts, not a\n" in capsys.readouterr().err


def test_it_is_found_before_torch_and_transformers_are_imported(place: Path):
    code = """if True:
        import json, shlex, sys
        from skipdecode.cli import main
        for command in json.load(sys.stdin):
            assert main(shlex.split(command)) == 2, command
            assert not {"torch", "transformers"} & sys.modules.keys(), command
    """
    commands = [command for command in WRONG if not any(text in command for text in BEHIND_TORCH)]
    assert len(commands) > 70
    subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(commands), text=True, cwd=place, env=subprocess_environment(), check=True,
    )  # fmt: skip


def test_exit_codes_tell_what_was_asked_from_what_failed():
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.SkipDecodeError)]
    failed = {error for error in kinds if error.exit_code == 1}
    assert failed == {errors.WorkError, errors.WriteError, errors.FetchError, errors.DivergedError}


def test_a_plan_for_a_known_cost_loads_no_weights(tmp_path: Path, own_cache: None):
    model = save_tiny_model(tmp_path / "model")
    command = ["plan", model, "--schedule", "2x", "--prompt-len", "8", "--seq-len", "8"]
    assert main(command) == 0
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main(command) == 0
    assert main([*command, "--remeasure"]) == 2


# ---------------------------------------------------------------------- bars and notes


def test_a_log_gets_lines_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    with progress.progress_bar(3, "batch", name="measuring") as bar:
        bar.update()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.05)
    with progress.progress_bar(4, "batch", name="measuring", done=1) as bar:
        bar.set_postfix(loss="1.5")
        time.sleep(0.06)
        for _ in range(3):
            bar.update()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("skipdecode: measuring: 2 of 4 batches, ")
    assert "loss=1.5" in first
    assert " left" in first
    assert last.startswith("skipdecode: measuring: 4 of 4 batches, ")
    with progress.progress_bar(None, "step", name="tune") as bar:  # under a clock: seen "00:00 left" of 20 minutes
        for bar.total in (None, 9):
            time.sleep(0.06)
            bar.update()
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("skipdecode: tune: 1 steps, ")
    assert " left" not in first
    assert " left" in last.removeprefix("skipdecode: tune: 2 of 9 steps, ")


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for shown in (True, False):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        with progress.progress_bar(2, "row", shown=shown) as bar:
            bar.update(2)
        assert ("100%" in screen.getvalue()) == shown


def test_other_packages_are_quiet_and_our_warnings_become_notes(capsys: Any):
    log = logging.getLogger("some.package")
    with progress.quiet():
        warnings.warn("theirs", stacklevel=1)
        log.warning("theirs too")
        warnings.warn_explicit("ours", UserWarning, "x.py", 1, module="skipdecode.engine.fast")
        warnings.warn_explicit("an open file", ResourceWarning, "x.py", 1, module="skipdecode.data.source")
    assert capsys.readouterr().err == "skipdecode: ours\n"
    with pytest.warns(UserWarning, match="theirs"):
        warnings.warn("theirs", stacklevel=1)
    assert log.isEnabledFor(logging.WARNING)


def test_a_verb_shows_no_bar_of_transformers(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    model = save_tiny_model(tmp_path / "model")
    transformers.utils.logging.enable_progress_bar()
    capfd.readouterr()
    assert main(["generate", str(model), "x", "--max-new-tokens", "2"]) == 0
    told = capfd.readouterr().err
    assert "Loading weights" not in told
    assert "\r" not in told
    assert all(line.startswith("skipdecode: ") for line in told.splitlines())


WORD, NUMBER = "[X]", 259
FORM = "--prompt-field prompt --response-field response"
VERBS = {
    "tune": f"--train x.jsonl --dev x.jsonl {FORM} --steps 1 --schedule 2x",
    "eval": "--task jsonl --data x.jsonl --max-new-tokens 2 --metrics rougeL --schedule 2x",
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Saves a model of 259 rows, with a tokenizer of 260 tokens."""
    monkeypatch.chdir(tmp_path)

    def save(**added: str) -> str:
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens(added) if added else tokenizer.add_tokens([WORD])
        tiny_model("llama", vocab_size=NUMBER).save_pretrained("model")
        tokenizer.save_pretrained("model")
        return "model"

    return save


def records(**last: str) -> None:
    rows = [{"prompt": "say " + c * n, "response": c * n, "reference": c} for n, c in enumerate("abcd", 1)]
    rows.append(rows[0] | last)
    Path("x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("field", ["prompt", "response"])
def test_an_unknown_token_is_refused_by_line(model: Callable[..., str], verb: str, field: str, capsys: Any) -> None:
    word = "reference" if (verb, field) == ("eval", "response") else field
    records(**{word: f"a{WORD}"})
    assert main([verb, model(), *VERBS[verb].split(), "--out", "out"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "line 5" in told
    assert f"{NUMBER} ('{WORD}')" in told


def test_a_padding_token_needs_no_row(model: Callable[..., str]) -> None:
    records()
    assert main(["tune", model(pad_token="[PAD]"), *VERBS["tune"].split(), "--out", "out"]) == 0


def test_other_records_are_generated(model: Callable[..., str], capsys: Any) -> None:
    records(prompt=f"a{WORD}")
    assert main(["generate", model(), "--input", "x.jsonl", "--max-new-tokens", "2", "--output", "out.jsonl"]) == 1
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [("error" in row, row.get("line")) for row in rows] == [(False, None)] * 4 + [(True, 5)]
    assert f"{NUMBER} ('{WORD}')" in rows[-1]["error"]


def test_a_file_for_llama_cpp_has_a_row_for_each_token(model: Callable[..., str], capsys: Any) -> None:
    pytest.importorskip("gguf")
    assert main(["export", model(), "--format", "gguf", "--out", "out"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{NUMBER} ('{WORD}')" in told
    assert str(NUMBER) in told
