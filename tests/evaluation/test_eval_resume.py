"""`skipdecode eval` interrupted while it scores: the same command goes on, nothing is done twice."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from eval_tools import arguments, prepare
from skipdecode.cli import main
from skipdecode.evaluation.metrics import METRICS
from skipdecode.evaluation.results import load_run
from textgen_tools import read_rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval")
    prepare(path)
    return path


def interrupt_scoring(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Ctrl-C arrives when ROUGE-L is computed for the `call`-th time."""
    statistics, calls = METRICS["rougeL"].statistics, count(1)

    def interrupted(self: Any, *args: Any) -> Any:
        if next(calls) == call:
            raise KeyboardInterrupt
        return statistics(self, *args)

    monkeypatch.setattr(METRICS["rougeL"], "statistics", interrupted)


def test_several_methods_go_on_after_an_interruption_while_scoring(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    names = ["full", "skipdecode-2x", "skipdecode-1.5x"]
    more = ["--seq-len", "6", "--methods", "full", "2x", "1.5x"]
    out, unbroken = tmp_path / "out", tmp_path / "unbroken"
    assert main(arguments(place, "--out", str(unbroken), *more)) == 0
    with monkeypatch.context() as patch:
        interrupt_scoring(patch, 2)
        assert main(arguments(place, "--out", str(out), *more)) == 130
    finished = {name: (out / "full" / name).stat().st_mtime_ns for name in ("run.json", "outputs.jsonl")}
    assert not (out / "skipdecode-2x" / "run.json").exists()
    lines = read_rows(out / "unfinished.jsonl")[1:]
    kept, turns = ([row for row in lines if row[0].startswith(what)] for what in ("batch", "speed"))
    # Another run may not replace what is finished, nor take over or throw away what is not.
    assert main(arguments(place, "--out", str(out), "--max-new-tokens", "5", *more)) == 2
    assert "give --overwrite to replace it" in capsys.readouterr().err
    assert finished == {name: (out / "full" / name).stat().st_mtime_ns for name in finished}
    # The same command goes on.
    assert main(arguments(place, "--out", str(out), *more)) == 0
    assert [line.partition(": ")[0] for line in capsys.readouterr().out.splitlines()[-3:]] == names
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    assert finished == {name: (out / "full" / name).stat().st_mtime_ns for name in finished}
    for number, name in enumerate(names):
        run, whole = load_run(out / name), load_run(unbroken / name)
        assert run.outputs == whole.outputs
        assert run.data["metrics"] == whole.data["metrics"]
        # The times are those of the first call: nothing was generated again.
        assert run.data["free_running"]["decode_seconds"] == sum(s[number]["decode_seconds"] for _, s in kept)
        # Of one round after the other, two batches each, the medians.
        rounds = [[side[number]["decode_seconds"] for _, side in turns[batch::2]] for batch in range(2)]
        assert run.data["speed"]["decode_seconds"] == pytest.approx(sum(map(median, rounds)))
    assert main(arguments(place, "--out", str(out), *more)) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_other_metrics_after_an_interruption_score_all_methods_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    call = arguments(place, "--out", str(tmp_path), "--seq-len", "6", "--methods", "full", "2x")
    with monkeypatch.context() as patch:
        interrupt_scoring(patch, 2)
        assert main(call) == 130
    assert main([*call, "--metrics", "rouge1"]) == 0
    for name in ("full", "skipdecode-2x"):
        metrics = load_run(tmp_path / name).data["metrics"]
        assert "rouge1" in metrics
        assert "rougeL" not in metrics
