"""The published table is made of eval runs, by one command, and README's Markdown is made of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from quality_runs import quality_runs, score
from skipdecode.evaluation.results import Run

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


def test_the_table_has_a_row_a_run_with_shares_of_full_depth(runs: dict[str, Run], tmp_path: Path):
    place, out = str(runs["full"].path.parents[1]), tmp_path / "table.json"
    assert script("quality_table").main([place, "--out", str(out), "--resamples", "50"]) == 0
    document = json.loads(out.read_text())
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
