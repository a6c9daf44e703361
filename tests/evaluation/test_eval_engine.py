"""Evaluation on the fast engine: the texts of transformers, and a run that says what ran and how fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference import kernels_or_skip
from skipdecode.cli import main
from skipdecode.evaluation.results import Run, load_run
from textgen_tools import save_tiny_model, write_rows

ROWS = [{"text": "ab" * (i % 4 + 1), "answer": f"answer number {i}"} for i in range(9)]
TASK = 'name: mine\nprompt: "{text}:"\nreferences: [answer]\nmax_new_tokens: 12\nmetrics: [bleu]\n'


@pytest.fixture(autouse=True)
def _native() -> None:
    kernels_or_skip()


# ---------------------------------------------------------------------- the verb


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval")
    save_tiny_model(path / "model")
    write_rows(path / "data.jsonl", ROWS)
    (path / "mine.yaml").write_text(TASK)
    return path


def evaluate(place: Path, *more: str) -> int:
    fixed = [str(place / "model"), "--task", str(place / "mine.yaml"), "--data", str(place / "data.jsonl")]
    return main(["eval", *fixed, "--resamples", "50", "--batch-size", "4", *more])


def runs(place: Path) -> dict[str, Run]:
    return {path.name: load_run(path) for path in place.iterdir() if path.is_dir()}


def test_both_engines_give_one_result(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = {}
    for engine in ("auto", "transformers"):
        out = tmp_path / engine
        assert evaluate(place, "--out", str(out), "--engine", engine, "--methods", "full", "2x", "--seq-len", "8") == 0
        found[engine] = runs(out)
    for name, fast in found["auto"].items():
        slow = found["transformers"][name]
        assert (fast.data["engine"], slow.data["engine"]) == ("fast", "transformers")
        assert fast.outputs == slow.outputs
        assert fast.data["metrics"] == slow.data["metrics"]
        for key in ("fed_tokens", "layer_tokens", "layers_per_token"):
            assert fast.data["speed"][key] == slow.data["speed"][key]
        assert fast.data["speed"]["tokens_per_s"] > 0 < fast.data["speed"]["seconds"]
    assert found["auto"]["skipdecode-2x"].data["decode_speedup"] > 0
    printed = capsys.readouterr().out
    assert "engine fast" in printed
    assert "engine transformers" in printed
