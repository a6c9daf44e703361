"""`skipdecode bench`: a document with every figure, ratios that follow from the seconds, runs in turn."""

from __future__ import annotations

import json
import shlex
import statistics
from pathlib import Path
from typing import Any

import pytest

from skipdecode import Schedule
from skipdecode.bench.measure import measure
from skipdecode.bench.peers import Peer, make_peer
from skipdecode.bench.workload import Workload
from skipdecode.cli import main
from skipdecode.geometry import ModelGeometry
from textgen_tools import save_tiny_model
from tiny import LAYERS, tiny_model

FIELDS = [
    "engine",
    "batch",
    "nominal_speedup",
    "mean_layers",
    "decode_tokens_per_s",
    "decode_speedup",
    "speedup_over_transformers",
    "amdahl_bound",
    "bytes_per_step",
    "roofline_share",
    "seconds",
]


def bench(*arguments: str) -> int:
    return main(["bench", "--dtype", "float32", "--prompt", "6", "--new", "9", *arguments])


def test_document_has_all_figures_and_its_ratios_follow_from_the_seconds(tmp_path: Path, capsys: Any):
    model, out, png = save_tiny_model(tmp_path), tmp_path / "out.json", tmp_path / "out.png"
    engines = ["--engines", "fast", "transformers", "gated"]
    more = ["--batches", "1", "3", "--nominal", "2", "--rounds", "2", "--out", str(out), "--png", str(png)]
    assert bench(model, *more, *engines) == 0
    assert "of bandwidth" in capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG")
    document = json.loads(out.read_text())
    assert set(document) == {"environment", "config", "bandwidth_gb_s", "rows"}
    words = shlex.split(document["config"]["command"])
    assert words[:3] == ["skipdecode", "bench", model]
    assert "--batches" in words
    found = {(r["batch"], r["engine"], r["nominal_speedup"]): r for r in document["rows"]}
    kinds = [("fast", 1), ("transformers", 1), ("gated", 1), ("fast", 2), ("gated", 2)]
    assert list(found) == [(b, e, n) for b in (1, 3) for e, n in kinds]
    schedule = Schedule.from_speedup(LAYERS, 2, 8)
    for (batch, engine, nominal), row in found.items():
        assert list(row) == FIELDS
        median = statistics.median(row["seconds"])
        assert len(row["seconds"]) == 2
        assert row["decode_tokens_per_s"] == pytest.approx(batch * 8 / median)
        full = statistics.median(found[batch, engine, 1]["seconds"])
        assert row["decode_speedup"] == pytest.approx(full / median)
        peer = statistics.median(found[batch, "transformers", 1]["seconds"])
        assert row["speedup_over_transformers"] == pytest.approx(peer / median)
        assert row["mean_layers"] == pytest.approx(LAYERS if nominal == 1 else schedule.mean_budget(8))
        wall = row["bytes_per_step"] / document["bandwidth_gb_s"] / 1e9
        assert row["roofline_share"] == pytest.approx(wall / (median / 8))
        assert row["amdahl_bound"] == 1 if nominal == 1 else 1 < row["amdahl_bound"] < LAYERS / row["mean_layers"]


def test_bytes_are_those_of_weights_head_and_cache():
    model = tiny_model("opt")
    row = measure(model, [make_peer("gated", model)], Workload((2,), 5, 4, (), 1))["rows"][0]
    geometry = ModelGeometry.from_config(model.config, 4)
    cache = (6 + 7 + 8) / 3 * 2 * geometry.kv_bytes_per_token()
    expected = geometry.fixed_bytes(2) + LAYERS * (geometry.layer_bytes(2) + cache)
    assert row["bytes_per_step"] == pytest.approx(expected)


def test_rounds_alternate_between_engines_and_schedules():
    calls: list[tuple[str, int, float]] = []

    class Noting(Peer):
        def __init__(self, name: str, skips: bool) -> None:
            self.name, self.skips = name, skips

        def prepare(self, batch: int, prompt: int, new: int) -> None:
            self.batch = batch

        def decode_seconds(self, schedule: Schedule) -> float:
            calls.append((self.name, self.batch, schedule.mean_budget(8)))
            return 1.0

    measure(tiny_model("llama"), [Noting("a", True), Noting("b", False)], Workload((1, 4), 6, 9, (2.0,), 2))
    mean = Schedule.from_speedup(LAYERS, 2, 8).mean_budget(8)
    assert calls == [(n, b, d) for b in (1, 4) for _ in range(2) for n, d in (("a", 8), ("b", 8), ("a", mean))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a model or --geometry"),
        (["x", "--geometry", "opt-1.3b"], "give either a model or --geometry"),
        (["x", "--batches", "0"], "--batches (0,) is not accepted"),
        (["x", "--prompt", "1"], "--prompt 1 is not accepted: give 2 to 512"),
        (["x", "--new", "2"], "--new 2 is not accepted"),
        (["x", "--nominal", "0.5"], "--nominal (0.5,) is not accepted"),
        (["x", "--rounds", "0"], "--rounds 0 is not accepted"),
        (["x", "--threads", "0"], "--threads 0 is not accepted"),
        (["x", "--out", "/no/such/folder/out.json"], "does not exist"),
    ],
)
def test_wrong_options_are_one_line(capsys: Any, arguments: list[str], message: str):
    assert bench(*arguments) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_engine_that_does_not_cover_the_model_is_refused(tmp_path: Path, capsys: Any):
    tiny_model("gpt2").save_pretrained(tmp_path)
    assert bench(str(tmp_path), "--engines", "fast") == 2
    assert "does not cover this model" in capsys.readouterr().err.splitlines()[-1]
