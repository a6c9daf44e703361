"""`skipdecode eval` as a user runs it: a run, a comparison, and one clear line for what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval_tools import ROWS, arguments, prepare
from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.evaluation.metrics import EncoderOptions, check_metrics
from skipdecode.evaluation.results import load_run
from textgen_tools import save_tiny_model, write_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, records, a task, and two runs."""
    path = tmp_path_factory.mktemp("eval")
    prepare(path)
    assert main(arguments(path, "--out", str(path / "full"), "--schedule", "full")) == 0
    assert main(arguments(path, "--out", str(path / "skip"), "--schedule", "2x", "--seq-len", "6")) == 0
    return path


def test_a_run_is_shown_next_to_full_depth_and_leaves_files(folder: Path, capsys: pytest.CaptureFixture[str]):
    out = folder / "again"
    assert main(arguments(folder, "--out", str(out), "--schedule", "2x", "--limit", "3")) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith("Scores"))
    assert [re.split(r" *\| *", line)[1] for line in lines[title + 3 : title + 5]] == ["full", "skipdecode-2x"]
    assert max(len(line) for line in lines if line.startswith("|")) <= 100
    assert lines[-2].startswith(f"full: {out / 'full' / 'run.json'}, outputs.jsonl")
    assert lines[-1].startswith(f"skipdecode-2x: {out / 'run.json'}, outputs.jsonl")
    assert sorted(path.name for path in out.iterdir()) == ["full", "outputs.jsonl", "run.json"]
    runs = [load_run(out / "full"), load_run(out)]
    first = [row["id"] for row in load_run(folder / "full").outputs[:3]]
    assert all([row["id"] for row in run.outputs] == first for run in runs)
    assert runs[1].data["config"]["data"] == "data.jsonl"
    assert [row["full_output"] for row in runs[1].outputs] == [row["output"] for row in runs[0].outputs]
    assert all(any(f"{run.data['metrics']['loss']['score']:.2f} ± " in line for line in lines) for run in runs)


def test_full_depth_may_be_left_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    call = arguments(folder, "--out", str(tmp_path), "--schedule", "2x", "--limit", "1", "--no-full-depth")
    assert main(call) == 0
    shown = capsys.readouterr().out
    assert "| full " not in shown
    assert not re.search(r"\d ± |\d \[\d", shown)  # one record has no interval
    assert not (tmp_path / "full").exists()
    data = load_run(tmp_path).data
    assert data["speed"] is data["decode_speedup"] is None
    assert set(data["metrics"]) == {"bleu", "rougeL", "loss"}
    assert "full_output" not in load_run(tmp_path).outputs[0]


def test_metrics_that_need_a_download_are_left_out_at_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    task = (folder / "mine.yaml").read_text().replace("[bleu, rougeL]", "[bleu, bertscore_f1]")
    (tmp_path / "mine.yaml").write_text(task)
    more = ["--out", str(tmp_path / "run"), "--schedule", "full", "--limit", "2", "--no-teacher-forced"]
    call = arguments(folder, *more, task=tmp_path / "mine.yaml")
    start = time.perf_counter()
    check_metrics(["bleu", "bertscore_f1"], EncoderOptions(), lambda line: None)
    assert time.perf_counter() - start < 1
    assert main(call) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "bertscore_f1" in line]
    assert len(notes) == 1
    assert "as bertscore_model" in notes[0]
    assert set(load_run(tmp_path / "run").data["metrics"]) == {"bleu"}
    # What was asked for by name is not left out, and no model is loaded first.
    broken = Path(shutil.copytree(folder / "model", tmp_path / "broken"))
    for weights in broken.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    for options in (["--metrics", "bleu", "bertscore_f1"], ["--bertscore-model", "nobody/nothing"]):
        call[1] = str(broken)
        assert main([*call, "--overwrite", *options]) == 1
        assert "as bertscore_model" in capsys.readouterr().err.splitlines()[-1]


def test_the_checkpoints_own_schedule_is_the_default_and_a_method_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    own = replace(Schedule.from_speedup(8, 2, 6), name="mine")
    call = arguments(folder, model=save_tiny_model(tmp_path / "tuned", skipdecode=own.to_dict()))
    assert main([*call, "--out", str(tmp_path / "default")]) == 0
    assert main([*call, "--out", str(tmp_path / "named"), "--methods", "full", "mine"]) == 0
    for name in ("default", "named/mine"):
        run = load_run(tmp_path / name)
        assert Schedule.from_dict(run.data["config"]["method"]["schedule"]) == own
        assert [row["output"] for row in run.outputs] == [row["output"] for row in load_run(folder / "skip").outputs]
    capsys.readouterr()
    assert main([*call, "--out", str(tmp_path / "out"), "--methods", "yours"]) == 2
    assert "accepted are full, mine by name" in capsys.readouterr().err


def test_several_methods_share_one_run_of_full_depth(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    schedule = load_run(folder / "skip").data["config"]["method"]["schedule"] | {"name": "mine / 2x"}
    (tmp_path / "mine.json").write_text(json.dumps(schedule))
    words = ["full", "2x", "1.5x", str(tmp_path / "mine.json"), "1.5x:p3"]
    call = arguments(folder, "--out", str(tmp_path / "out"), "--name", "base", "--seq-len", "6")
    call += ["--no-teacher-forced", "--methods", *words]
    assert main(call) == 0
    lines = capsys.readouterr().out.splitlines()
    title = next(i for i, line in enumerate(lines) if line.startswith("Scores"))
    names = [line.split("|")[1].strip() for line in lines[title + 3 : title + 8]]
    assert names == [
        "base full",
        "base skipdecode-2x",
        "base skipdecode-1.5x",
        "base mine / 2x",
        "base skipdecode-p3-1.5x",
    ]
    folders = ["full", "skipdecode-2x", "skipdecode-1.5x", "mine-2x", "skipdecode-p3-1.5x"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(folders)
    runs = {name: load_run(tmp_path / "out" / name) for name in folders}
    alone = {"full": load_run(folder / "full"), "skipdecode-2x": load_run(folder / "skip")}
    for name, run in alone.items():
        assert [r["output"] for r in runs[name].outputs] == [r["output"] for r in run.outputs]
    assert "kl" in load_run(folder / "skip").data["metrics"]
    assert "kl" not in runs["skipdecode-2x"].data["metrics"]
    speeds = [runs[name].data["full_depth_speed"] for name in folders[1:]]
    full = runs["full"].data["speed"]
    assert speeds == [{name: full[name] for name in speeds[0]}] * 4
    even, split = (Schedule.from_dict(runs[n].data["config"]["method"]["schedule"]) for n in folders[2::2])
    assert split == replace(even, prompt=(0, 1, 2), name="skipdecode-p3-1.5x")


def test_compare_prints_paired_intervals(folder: Path, capsys: pytest.CaptureFixture[str]):
    assert (
        main(["eval", "--compare", str(folder / "full"), str(folder / "skip" / "run.json"), "--metrics", "rougeL"]) == 0
    )
    printed = capsys.readouterr().out
    assert re.search(r"Against A, full .*\n.*\n.*\n\| rougeL +\| skipdecode-2x \| .*\[[-+]\d", printed)
    assert main(["eval", "--json", "--compare", str(folder / "full"), str(folder / "full")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [pair["metric"] for pair in document["pairs"]] == ["bleu", "rougeL", "loss"]
    assert all(pair["difference"]["low"] <= 0 <= pair["difference"]["high"] for pair in document["pairs"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--out", "{folder}/full"], "holds a run already"),
        (["--out", "{folder}/x", "--methods", "even:2"], "unknown schedule 'even:2'"),
        (["--out", "{folder}/x", "--methods", "2x", "2x"], "have skipdecode-2x twice"),
        (["--out", "{folder}/x", "--seq-len", "8"], "--seq-len needs --schedule"),
        (["--out", "{folder}/x", "--max-new-tokens", "95"], "there is room for 1"),
        (["--out", "{folder}/data.jsonl/x"], "is not a writable directory"),
        (["--compare", "{folder}/full"], "exclude each other"),
    ],
)
def test_bad_input_is_one_clear_line(folder: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments(folder, *(text.format(folder=folder) for text in more))) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipdecode: ")]
    assert message in lines[-1]


def test_prompts_that_are_too_long_are_told_at_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    long = [{"id": name, "text": "x" * (100 + i), "answer": "a"} for i, name in enumerate("ab")]
    data = write_rows(tmp_path / "d.jsonl", [ROWS[0], long[0], *ROWS[1:3], long[1]])
    call = arguments(folder, "--out", str(tmp_path / "run"), "--schedule", "full", data=data)
    assert main(call) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "2 records cannot be used (2 prompt too long)" in message
    assert "line 2: prompt too long: that of record a has 101 tokens, there is room for 90; line 5: " in message
    assert message.endswith("or give --bad-records skip")


def test_bad_records_are_skipped_on_request(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    long = {"id": "a", "text": "x" * 100, "answer": "a"}
    data = write_rows(tmp_path / "d.jsonl", [ROWS[0], long, {"text": 7}, *ROWS[1:3], "no object"])
    call = arguments(folder, "--out", str(tmp_path / "run"), "--schedule", "full", data=data)
    assert main(call) == 2
    assert "line 3: missing field: 'answer'" in capsys.readouterr().err
    assert main([*call, "--bad-records", "skip"]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if " left out: " in line]
    assert notes[0].startswith("skipdecode: 2 records left out: line 3: missing field")
    assert notes[1].startswith("skipdecode: 1 record left out: line 2: prompt too long: that of record a")
    run = load_run(tmp_path / "run")
    assert [row["id"] for row in run.outputs] == ["1", "4", "5"]
    assert [line for line, _ in run.data["config"]["skipped_records"]] == [3, 6, 2]


def test_nothing_left_is_an_error_though_bad_records_are_skipped(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    more = ["--max-new-tokens", "95", "--bad-records", "skip"]
    assert main(arguments(folder, "--out", str(tmp_path / "x"), "--schedule", "full", *more)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "8 records cannot be used (8 prompt too long)" in message
    assert "--bad-records" not in message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"template": "Q: {text}"}, "the model was tuned with the template 'Q: {text}', chat=False;"),
        ({"template": "{text}:"}, None),
        ({"template": "{text}:", "chat": True}, "the model was tuned with the template '{text}:', chat=True;"),
        ({}, None),
    ],
)
def test_a_model_tuned_on_other_prompts_is_told(
    folder: Path, tmp_path: Path, prompt: dict[str, Any], message: str | None, capsys: pytest.CaptureFixture[str]
):
    save_tiny_model(tmp_path / "tuned")
    recipe = {"options": {}, "prompt": prompt, "schedule": Schedule.full(8).to_dict()}
    (tmp_path / "tuned/recipe.json").write_text(json.dumps(recipe))
    more = ["--out", str(tmp_path / "run"), "--schedule", "full", "--limit", "1"]
    call = arguments(folder, *more, model=tmp_path / "tuned")
    assert main(call) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "the model was tuned with" in line]
    assert len(notes) == (message is not None)
    assert message is None or message in notes[0]


def test_both_engines_give_one_result(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    kernels_or_skip()
    engines, methods = ("fast", "transformers"), ("full", "skipdecode-2x")
    for engine in engines:
        more = ["--out", str(tmp_path / engine), "--engine", engine, "--methods", "full", "2x", "--seq-len", "8"]
        assert main(arguments(folder, *more)) == 0
        assert f"engine {engine}" in capsys.readouterr().out
    for name in methods:
        fast, slow = (load_run(tmp_path / engine / name) for engine in engines)
        assert (fast.data["engine"], slow.data["engine"]) == engines
        for mine, other in zip(fast.outputs, slow.outputs, strict=True):
            assert (mine.pop("statistics")["loss"], mine) == (pytest.approx(other.pop("statistics")["loss"]), other)
        assert all(fast.data["speed"][name] == slow.data["speed"][name] for name in ("fed_tokens", "layer_tokens"))
        assert fast.data["speed"]["tokens_per_s"] > 0 < fast.data["speed"]["seconds"]
    assert fast.data["decode_speedup"] > 0
