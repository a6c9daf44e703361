"""Tables of pages are those of the results; the figures of `benchmarks/speed.py` follow from the seconds."""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skipdecode import Schedule
from skipdecode.common.jsonl import read_result
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.engine.opening import Backend
from skipdecode.generation.speed import Method
from skipdecode.models.families import FAMILIES
from survey import faults, known
from textgen_tools import save_tiny_model
from tiny import LAYERS, tiny_model

PROMPTS = [[5, 6, 7, 8, 9, 5, 6, 7], [11, 12, 13, 14]]


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    script = importlib.import_module("speed")
    monkeypatch.setattr(script, "measure_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(script, "measure_products", lambda kind, device: 1e10)
    return script


def ratio(over: dict[str, Any], under: dict[str, Any], *parts: str) -> float:
    sums = ([sum(each) for each in zip(*(row[part] for part in parts), strict=True)] for row in (over, under))
    return statistics.median(a / b for a, b in zip(*sums, strict=True))


def test_ratios_follow_from_the_seconds(speed: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    engines = ["--engines", "fast", "transformers", "transformers-static", "gated"]
    size = ["--batches", "1", "3", "--nominal", "2", "--rounds", "2", "--prompt", "6", "--new", "9"]
    assert speed.main([save_tiny_model(tmp_path), *engines, *size, "--dtype", "float32", "--out", str(out)]) == 0
    assert "of limit" in capsys.readouterr().out
    document = json.loads(out.read_text())
    assert document["kind"] == "bench"
    found = {(r["batch"], r["engine"], r["nominal_speedup"]): r for r in document["rows"]}
    kinds = [("fast", 1), ("fast", 2), ("transformers", 1), ("transformers-static", 1), ("gated", 1), ("gated", 2)]
    assert list(found) == [(b, e, n) for b in (1, 3) for e, n in kinds]
    schedule = Schedule.from_speedup(LAYERS, 2, 8)
    for (batch, engine, nominal), row in found.items():
        own, theirs, steps = found[batch, engine, 1], found[batch, "transformers", 1], ("seconds",)
        assert row["decode_tokens_per_s"] == pytest.approx(batch * 8 / statistics.median(row["seconds"]))
        assert row["decode_speedup"] == pytest.approx(ratio(own, row, *steps))
        assert row["speedup_over_transformers"] == pytest.approx(ratio(theirs, row, *steps))
        assert row["request_speedup"] == pytest.approx(ratio(own, row, *steps, "prompt_seconds"))
        assert row["mean_layers"] == pytest.approx(LAYERS if nominal == 1 else schedule.mean_budget(8))
        walls = row["bytes_per_step"] / 1e9, row["flops_per_step"] / 1e10
        assert row["limit"] == ("bytes" if walls[0] == max(walls) else "arithmetic")
        assert row["roofline_share"] == pytest.approx(statistics.median(max(walls) / (s / 8) for s in row["seconds"]))


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
@pytest.mark.parametrize("engine", ["gated", "fast"])
def test_bytes_are_those_of_weights_head_and_cache(speed: Any, engine: str, family: str) -> None:
    model = tiny_model(family)
    (row,) = speed.measure(speed.runs_of(model, [engine], [1], 3, 5), [2], [5], 4, 1)["rows"]
    geometry = ModelGeometry.from_config(model.config, 4)
    cache = (6 + 7 + 8) / 3 * 2 * geometry.keys[0] * geometry.dtype_bytes
    head = model.get_output_embeddings().weight.numel()
    expected = 4 * (head + 2 * geometry.hidden_size) + LAYERS * (4 * geometry.layer_params + cache)
    # The engine's norms of query and key heads, some dozens of numbers, are not counted apart.
    assert row["bytes_per_step"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", ["transformers", "transformers-static"])
def test_generate_gives_the_tokens_of_gated_full_depth(speed: Any, name: str) -> None:
    model = tiny_model("llama")
    ours, theirs = Method(Backend(model)), speed.opened(name, model)
    end = {ours.generate(PROMPTS, max_new_tokens=12, eos=set()).tokens[0][4]}
    expected, found = (each.generate(PROMPTS, max_new_tokens=12, eos=end) for each in (ours, theirs))
    assert (found.tokens, found.layer_tokens) == (expected.tokens, expected.layer_tokens)


ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_results():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_page_of_model_types_says_what_the_tables_of_the_package_say():
    found = read_result(ROOT / "results" / "families.json")
    assert [row["type"] for row in found["rows"]] == sorted(FAMILIES)
    assert all(row == row | known(row["type"]) for row in found["rows"])
    assert found["faults"] == faults()


def test_readme_opens_with_what_a_reader_needs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"For [{len(FAMILIES)} model types](docs/models.md)" in readme
    assert max(map(len, readme.splitlines())) <= 120
    text = "\n".join(readme.splitlines()[:80])
    table = "<!-- table first results/"
    for needed in (
        table,
        "make demo",
        "make test",
        "skipdecode.attach",
        "skipdecode generate",
        "skipdecode prepare",
        "skipdecode serve",
    ):
        assert needed in text
