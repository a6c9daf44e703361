"""`skipdecode.evaluate` in Python: a loaded model or a name, records or no references; the results of the verb."""

from __future__ import annotations

from pathlib import Path

import pytest

import skipdecode
from eval_tools import ROWS, arguments, prepare
from skipdecode.cli import main
from skipdecode.errors import UsageError
from skipdecode.evaluation.results import load_run

FAST = {"resamples": 20, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluate")
    prepare(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> skipdecode.LLM:
    return skipdecode.LLM(str(folder / "model"))


def test_records_are_scored_as_by_the_verb(folder: Path, llm: skipdecode.LLM, tmp_path: Path):
    own = skipdecode.Schedule.constant(8, 5, name="own")
    scores = skipdecode.evaluate(llm, ROWS, ["full", "2x:p4", own], task=folder / "mine.yaml", **FAST)
    assert [row["name"] for row in scores.rows] == ["full", "skipdecode-p4-2x", "own"]
    assert scores["full"]["kept"] == scores["full"]["request_speedup"] == 1
    assert scores["2x:p4"] is scores["skipdecode-p4-2x"]
    with pytest.raises(UsageError, match="accepted are full, 2x:p4, full, skipdecode-p4-2x, own"):
        scores["3x"]
    assert scores[own]["kept"] <= 1
    assert scores[own]["request_speedup"] > 0
    assert scores._repr_markdown_() == str(scores)
    assert sum(line.startswith("| own ") for line in str(scores).splitlines()) in (4, 5)  # by their width
    own.save(tmp_path / "own.json")
    assert (
        main(
            arguments(folder, "--out", str(tmp_path / "out"), "--methods", "full", "2x:p4", str(tmp_path / "own.json"))
        )
        == 0
    )
    for run, name in zip(scores.runs, ("full", "skipdecode-p4-2x", "own"), strict=True):
        assert run.outputs == load_run(tmp_path / "out" / name).outputs
    # One schedule has the directory for itself, and a name is loaded.
    options = {"task": folder / "mine.yaml", "out": tmp_path / "one", **FAST}
    one = skipdecode.evaluate(folder / "model", folder / "data.jsonl", own, **options)
    assert one.runs[1].path == tmp_path / "one" / "run.json"
    assert one.runs[1].outputs == scores.runs[2].outputs
    assert skipdecode.evaluate(llm, ROWS, None, task=folder / "mine.yaml", **FAST).rows[0]["name"] == "full"


def test_without_references_texts_are_compared_with_the_base_model(llm: skipdecode.LLM, tmp_path: Path):
    options = {"schedules": ["2x", "1.5x"], "prompts": ["hello", "a b c"], "max_new_tokens": 8, **FAST}
    scores = skipdecode.evaluate(llm, **options)
    base, deep, _ = scores.rows
    assert (base["name"], base["kept"], deep["name"]) == ("base", 1, "skipdecode-2x")
    assert 0 < deep["kept"] < 1 < deep["perplexity_ratio"]
    assert "| skipdecode-2x " in str(scores)
    assert {len(row["texts"]) for row in scores.runs[0].outputs} == {3}
    loaded = skipdecode.load(llm.loaded.checkpoint.name)  # the same model beside it: its full depth is measured too
    with_full = skipdecode.evaluate(llm, base=loaded, **options)
    assert [row["name"] for row in with_full.rows] == ["base", "full", "skipdecode-2x", "skipdecode-1.5x"]
    assert with_full["skipdecode-2x"]["scores"] == deep["scores"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedules": "full"}, "no schedule to compare"),
        ({"schedules": "2x", "metrics": ["bleu"]}, "metrics needs records"),
        ({"schedules": "2x", "data": ROWS, "base": "x"}, "base is for"),
        ({"schedules": "2x", "data": ROWS, "prompts": ["a"]}, "prompts is for"),
        ({"schedules": "2x", "limit": 0}, "limit=0 is not accepted"),
    ],
)
def test_arguments_that_do_not_fit_are_named(llm: skipdecode.LLM, options: dict, message: str):
    with pytest.raises(UsageError, match=message):
        skipdecode.evaluate(llm, **options)
