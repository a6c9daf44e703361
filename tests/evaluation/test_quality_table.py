"""The published table is made of eval runs, by one command, and README's Markdown is made of it."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checkpoints import save_checkpoint
from quality_runs import REFERENCES, quality_runs, score
from skipdecode import Schedule
from skipdecode.evaluation.results import Run
from tiny import LAYERS

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:  # scripts of the folder import one another
        patch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    pytest.importorskip("bert_score")
    return quality_runs(tmp_path_factory.mktemp("quality") / "runs")


def built(runs: dict[str, Run], out: Path, *more: str) -> dict[str, Any]:
    place = str(runs["full"].path.parents[1])
    assert script("quality_table").main([place, "--out", str(out), "--resamples", "50", *more]) == 0
    return json.loads(out.read_text())


def test_the_table_has_a_row_a_run_with_shares_of_full_depth(runs: dict[str, Run], tmp_path: Path):
    document = built(runs, tmp_path / "table.json")
    rows = {(r["method"], r["nominal_speedup"]): r for r in document["runs"]}
    assert list(rows) == [("full", 1.0), ("flat", 2.0), ("flat", 4.0)]
    full, two, four = rows.values()
    for name in ("bleu", "rougeL", "bertscore_f1"):
        assert four[name] == score(runs["flat-4x"], name)
        low, high = four["intervals"][name]
        assert low <= four[name] <= high
        assert two["retained"][name]["share"] == pytest.approx(1)
        share = four["retained"][name]
        assert share["share"] == pytest.approx(four[name] / full[name])
        assert share["low"] <= share["share"] <= share["high"] < 1
    # The canned methods' time is proportional to their layers.
    assert four["decode_speedup"] == pytest.approx(4)
    assert four["speed_from"]["run"] == "the evaluation itself"
    assert (four["mean_layers"], four["n"], four["checkpoint"]) == (2, 8, "checkpoint")
    assert document["recipe"]["options"] | {"model": "base"} == document["recipe"]["options"]
    assert "/secret" not in json.dumps(document)
    assert document["environment"]["packages"]["torch"]


def test_the_best_run_of_a_speed_up_is_compared_with_the_others(runs: dict[str, Run], tmp_path: Path):
    data = json.loads(json.dumps(runs["flat-4x"].data))
    data["nominal_speedup"] = runs["flat-2x"].data["nominal_speedup"]
    other = tmp_path / "other"
    other.mkdir()
    for file in runs["flat-4x"].path.parent.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "run.json").write_text(json.dumps(data))
    full, two = (str(runs[name].path.parent) for name in ("full", "flat-2x"))
    out = tmp_path / "table.json"
    assert script("quality_table").main([full, two, str(other), "--out", str(out), "--resamples", "50"]) == 0
    (lead,) = json.loads(out.read_text())["leads"]
    assert (lead["nominal_speedup"], lead["best"]) == (2, "flat")
    ahead = lead["ahead"]["bleu"]
    assert ahead["points"] == pytest.approx(score(runs["flat-2x"], "bleu") - score(runs["flat-4x"], "bleu"))
    assert 0 < ahead["low"] <= ahead["points"] <= ahead["high"]
    tables = script("tables")
    assert "| 2x | flat | flat | +" in tables.markdown(tables.leads({"leads": [lead]}))


def test_speed_may_be_measured_apart_for_equal_lengths(
    runs: dict[str, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    save_checkpoint(tmp_path / "model")
    place, speed = str(runs["full"].path.parents[1]), tmp_path / "speed.json"
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    options = ["--model", str(tmp_path / "model"), "--dtype", "float32", "--batch-size", "3"]
    command = [place, *options, "--out", str(speed)]
    assert script("schedule_speed").main(command) == 0
    measured = json.loads(speed.read_text())
    texts = [len(reference) + 1 for reference in REFERENCES]
    # Every row is fed all but its last token, whatever the model says; a layer is counted for each.
    assert [row["speed"]["fed_tokens"] for row in measured["rows"]] == [sum(texts) - len(texts)] * 2
    assert [row["speed"]["layers_per_token"] for row in measured["rows"]] == [4, 2]
    assert measured["full_depth"]["layers_per_token"] == LAYERS
    document = built(runs, tmp_path / "table.json", "--speed", str(speed))
    rows = document["runs"]
    assert [r["decode_speedup"] for r in rows] == [1.0, *(row["decode_speedup"] for row in measured["rows"])]
    assert [r["speed_from"]["run"] for r in rows] == ["measured apart"] * 3
    stamp = speed.stat().st_mtime_ns
    assert script("schedule_speed").main(command) == 0
    assert speed.stat().st_mtime_ns == stamp


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The commands that make a table, or one checkpoint of it."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    main = script("quality_runs").main

    def commands(table: str, *more: str) -> list[list[str]]:
        capsys.readouterr()
        assert main([table, *more, "--data", "data", "--runs", str(tmp_path), "--dry-run"]) == 0
        return [shlex.split(line.removeprefix("$ ")) for line in capsys.readouterr().out.splitlines()]

    return commands


@pytest.mark.parametrize(
    ("table", "calibrates"),
    [("e2e", True), ("tldr", True), ("ablations", False), ("request", False), ("any-speed", False)],
)
def test_the_runs_behind_a_table_are_shown_with_their_schedules(planned: Any, table: str, calibrates: bool):
    commands = planned(table)
    named = {Path(word) for words in commands for word in words if word.endswith("x.json")}
    learned = {path for path in named if path.name.startswith(("calibrated", "curve", "pruned"))}
    # Made by the calibration, which is then among the commands.
    assert bool(learned) == calibrates
    assert any(words[1].endswith("/calibrate.py") for words in commands) == calibrates
    for path in named - learned:
        schedule = Schedule.from_json(path.read_text())
        speedup = float(path.stem.rpartition("-")[2].removesuffix("x"))
        assert schedule.nominal_speedup == pytest.approx(speedup, rel=0.05)
    # What is evaluated was tuned before.
    tuned = {words[words.index("--out") + 1] for words in commands if words[:2] == ["skipdecode", "tune"]}
    assert {words[2] for words in commands if words[:2] == ["skipdecode", "eval"]} <= tuned
