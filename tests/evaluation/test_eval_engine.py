"""Evaluation on the fast engine: the texts of transformers, and a run that says what ran and how fast."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.opening import Backend
from skipdecode.evaluation.methods import Method
from skipdecode.evaluation.results import Run, load_run
from textgen_tools import save_tiny_model, write_rows
from tiny import LAYERS, tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [11, 12], list(range(20, 50))]
SCHEDULE = Schedule.from_speedup(LAYERS, 2, 12)
ROWS = [{"text": "ab" * (i % 4 + 1), "answer": f"answer number {i}"} for i in range(9)]
TASK = 'name: mine\nprompt: "{text}:"\nreferences: [answer]\nmax_new_tokens: 12\nmetrics: [bleu]\n'


@pytest.fixture(autouse=True)
def _native() -> None:
    kernels_or_skip()


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("schedule", [None, SCHEDULE], ids=["full", "schedule"])
def test_a_method_gives_the_same_tokens_and_layers_on_both_engines(family: str, schedule: Schedule | None):
    model = tiny_model(family)
    method = Method(Backend(model), schedule)
    ends = {method.generate(PROMPTS, max_new_tokens=12, eos=set()).tokens[1][4]}
    expected = method.generate(PROMPTS, max_new_tokens=12, eos=ends)
    fast = Method(Backend(model, open_model(model)), schedule)
    found = fast.generate(PROMPTS, max_new_tokens=12, eos=ends)
    assert (found.tokens, found.layer_tokens, found.fed_tokens) == (
        expected.tokens,
        expected.layer_tokens,
        expected.fed_tokens,
    )
    assert found.prompt_seconds > 0 < found.decode_seconds
    assert (fast.name, fast.settings(), fast.full_depth) == (method.name, method.settings(), method.full_depth)


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
