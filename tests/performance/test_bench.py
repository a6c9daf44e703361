"""`skipdecode bench`: a document with every figure, ratios that follow from the seconds, runs in turn."""

from __future__ import annotations

import json
import shlex
import statistics
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import save_adapter
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine import Engine
from skipdecode.engine.opening import Backend
from skipdecode.errors import ScheduleError
from skipdecode.performance import machine
from skipdecode.performance.bench import measure as measure_module
from skipdecode.performance.bench.measure import measure, open_backend
from skipdecode.performance.bench.profile import profile
from skipdecode.performance.bench.workload import Workload, build
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.measure import Shape, step_seconds
from textgen_tools import save_tiny_model
from tiny import LAYERS, tiny_model

FIELDS = [
    "engine",
    "weights",
    "batch",
    "prompt",
    "new",
    "nominal_speedup",
    "mean_layers",
    "request_speedup",
    "request_speedup_over_transformers",
    "decode_tokens_per_s",
    "ms_per_step",
    "decode_speedup",
    "speedup_over_transformers",
    "amdahl_bound",
    "bytes_per_step",
    "flops_per_step",
    "limit",
    "roofline_share",
    "seconds",
    "prompt_seconds",
    "bandwidth_gb_s",
    "products_gflop_s",
]


measure_once = cache(machine.measure_bandwidth)
products_once = cache(machine.measure_products)


@pytest.fixture(autouse=True)
def _bandwidth_measured_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(measure_module, "measure_bandwidth", measure_once)
    monkeypatch.setattr(measure_module, "measure_products", products_once)


def bench(*arguments: str) -> int:
    return main(["bench", "--dtype", "float32", "--prompt", "6", "--new", "9", *arguments])


def ratio(over: dict[str, Any], under: dict[str, Any]) -> float:
    return statistics.median(a / b for a, b in zip(over["seconds"], under["seconds"], strict=True))


def requests(row: dict[str, Any]) -> list[float]:
    return [sum(pair) for pair in zip(row["seconds"], row["prompt_seconds"], strict=True)]


def test_prompts_run_the_layers_that_were_asked_for_and_are_left_out_on_demand(tmp_path: Path):
    model = tiny_model("llama")
    schedules = Workload((1,), (6,), 9, (2.0,), 1, prompt_layers="2").schedules(LAYERS)
    assert [len(schedule.prompt_layers()) for schedule in schedules.values()] == [LAYERS, 2]
    with pytest.raises(ScheduleError, match="prompt layers '0-99'"):
        Workload((1,), (6,), 9, (2.0,), 1, prompt_layers="0-99").schedules(LAYERS)
    (row,) = measure([open_backend("fast", model)], Workload((2,), (5,), 4, (), 1, prompts=False))["rows"]
    assert (row["prompt_seconds"], row["request_speedup"]) == ([], None)
    assert row["decode_speedup"] == 1


def test_document_has_all_figures_and_its_ratios_follow_from_the_seconds(tmp_path: Path, capsys: Any):
    model, out, png = save_tiny_model(tmp_path), tmp_path / "out.json", tmp_path / "out.png"
    engines = ["--engines", "fast", "transformers", "transformers-static", "gated"]
    more = ["--batches", "1", "3", "--nominal", "2", "--rounds", "2", "--out", str(out), "--png", str(png)]
    assert bench(model, *more, *engines) == 0
    assert "of limit" in capsys.readouterr().out
    assert png.read_bytes().startswith(b"\x89PNG")
    document = json.loads(out.read_text())
    assert set(document) == {
        "kind",
        "format",
        "environment",
        "config",
        "bandwidth_gb_s",
        "products_gflop_s",
        "rows",
    }
    words = shlex.split(document["config"]["command"])
    assert words[:3] == ["skipdecode", "bench", model]
    assert "--batches" in words
    found = {(r["batch"], r["engine"], r["nominal_speedup"]): r for r in document["rows"]}
    kinds = [("fast", 1), ("transformers", 1), ("transformers-static", 1), ("gated", 1), ("fast", 2), ("gated", 2)]
    assert list(found) == [(b, e, n) for b in (1, 3) for e, n in kinds]
    schedule = Schedule.from_speedup(LAYERS, 2, 8)
    for (batch, engine, nominal), row in found.items():
        assert list(row) == FIELDS
        median = statistics.median(row["seconds"])
        assert len(row["seconds"]) == 2
        assert row["decode_tokens_per_s"] == pytest.approx(batch * 8 / median)
        assert row["decode_speedup"] == pytest.approx(ratio(found[batch, engine, 1], row))
        assert row["speedup_over_transformers"] == pytest.approx(ratio(found[batch, "transformers", 1], row))
        cells = (engine, 1), (engine, nominal), ("transformers", 1)
        whole = {cell: {"seconds": requests(found[batch, *cell])} for cell in cells}
        assert row["request_speedup"] == pytest.approx(ratio(whole[engine, 1], whole[engine, nominal]))
        over = ratio(whole["transformers", 1], whole[engine, nominal])
        assert row["request_speedup_over_transformers"] == pytest.approx(over)
        assert row["mean_layers"] == pytest.approx(LAYERS if nominal == 1 else schedule.mean_budget(8))
        reads = [row["bytes_per_step"] / b / 1e9 for b in row["bandwidth_gb_s"]]
        products = [row["flops_per_step"] / p / 1e9 for p in row["products_gflop_s"]]
        walls = [max(pair) for pair in zip(reads, products, strict=True)]
        assert row["limit"] == ("bytes" if walls == reads else "arithmetic")
        shares = [wall / (s / 8) for wall, s in zip(walls, row["seconds"], strict=True)]
        assert row["roofline_share"] == pytest.approx(statistics.median(shares))
        assert row["amdahl_bound"] == 1 if nominal == 1 else 1 < row["amdahl_bound"] < LAYERS / row["mean_layers"]


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
@pytest.mark.parametrize("engine", ["gated", "fast"])
def test_bytes_are_those_of_weights_head_and_cache(engine: str, family: str):
    model = tiny_model(family)
    row = measure([open_backend(engine, model)], Workload((2,), (5,), 4, (), 1))["rows"][0]
    geometry = ModelGeometry.from_config(model.config, 4)
    cache = (6 + 7 + 8) / 3 * 2 * geometry.kv_bytes_per_token()
    expected = geometry.fixed_bytes(2) + LAYERS * (geometry.layer_bytes(2) + cache)
    # The engine's norms of query and key heads, some dozens of numbers, are not counted apart.
    assert row["bytes_per_step"] == pytest.approx(expected, rel=0.01)


def test_a_step_is_bound_by_its_operations_where_they_take_longer_than_its_bytes(monkeypatch: Any):
    model = tiny_model("llama", hidden_size=64)
    geometry, backends = ModelGeometry.from_config(model.config, 4), [open_backend("fast", model)]
    for rate, limit in ((1e12, "bytes"), (1e3, "arithmetic")):
        monkeypatch.setattr(measure_module, "measure_products", lambda kind, device, rate=rate: rate)
        monkeypatch.setattr(measure_module, "measure_bandwidth", lambda device: 1e6)
        row = measure(backends, Workload((2,), (5,), 4, (), 1))["rows"][0]
        attended = (6 + 7 + 8) / 3 * 2 * geometry.kv_flops_per_token()
        flops = 2 * geometry.fixed_flops() + LAYERS * (2 * geometry.layer_flops() + attended)
        wall = flops / 1e3 if limit == "arithmetic" else row["bytes_per_step"] / 1e6
        assert row["flops_per_step"] == pytest.approx(flops)
        assert (row["limit"], row["roofline_share"]) == (limit, pytest.approx(wall / (row["seconds"][0] / 3)))


def test_rounds_alternate_between_engines_and_schedules():
    calls: list[tuple[str, int, float]] = []

    class Noting(Backend):
        def __init__(self, name: str, runs_schedules: bool) -> None:
            super().__init__(tiny_model("llama"), name=name)
            self.runs_schedules = runs_schedules

        def engine(self, schedule: Schedule | None = None, *, max_rows: int = 8, **options: Any) -> Engine:
            calls.append((self.name, max_rows, schedule.mean_budget(8)))
            return super().engine(schedule, max_rows=max_rows)

    measure([Noting("a", True), Noting("b", False)], Workload((1, 4), (6,), 9, (2.0,), 2, prompts=False))
    mean = Schedule.from_speedup(LAYERS, 2, 8).mean_budget(8)
    there = [("a", 8), ("a", mean), ("b", 8)]  # an engine's schedules next to each other
    assert calls == [(n, b, d) for b in (1, 4) for n, d in (*there, *there[::-1])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a model or --geometry"),
        (["x", "--geometry", "opt-1.3b"], "give either a model or --geometry"),
        (["x", "--batches", "0"], "--batches 0 is not accepted"),
        (["x", "--prompt", "1"], "--prompt 1 is not accepted: give 2 or more"),
        (["x", "--new", "2"], "--new 2 is not accepted"),
        (["x", "--nominal", "0.5"], "--nominal 0.5 is not accepted"),
        (["x", "--rounds", "0"], "--rounds 0 is not accepted"),
        (["x", "--threads", "0"], "--threads 0 is not accepted"),
        (["x", "--out", "/dev/null/out.json"], "cannot write /dev/null/out.json"),
    ],
)
def test_wrong_options_are_one_line(capsys: Any, arguments: list[str], message: str):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("geometry", "billions"), [("opt-1.3b", 1.316), ("opt-6.7b", 6.658), ("smollm2-135m", 0.1345)])
def test_geometries_are_those_of_the_models(geometry: str, billions: float):
    model = build(geometry, torch.bfloat16, "meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.001)


def test_quantized_weights_are_read_as_such():
    model = tiny_model("llama", hidden_size=64, intermediate_size=128)
    backends = [open_backend(name, model) for name in ("fast", "fast-int8", "fast-int4")]
    rows = measure(backends, Workload((1,), (6,), 5, (), 1))["rows"]
    assert [(r["engine"], r["weights"]) for r in rows] == [
        ("fast", "float32"),
        ("fast-int8", "int8"),
        ("fast-int4", "int4"),
    ]
    whole, eight, four = (r["bytes_per_step"] for r in rows)
    assert 1 / 4 < eight / whole < 0.35
    assert 1 / 8 < four / whole < 0.25


def test_a_longer_prompt_than_a_forward_of_the_engine_keeps_rows_in_step():
    model = tiny_model("llama", max_position_embeddings=2048)
    document = measure([open_backend("fast", model)], Workload((3,), (6, 900), 5, (), 1))
    short, long = document["rows"]
    assert (short["prompt"], long["prompt"]) == (6, 900)
    assert len(step_seconds(open_backend("fast", model), Schedule.full(LAYERS), Shape(3, 900, 5))) == 4
    assert long["bytes_per_step"] > short["bytes_per_step"]


def test_profile_accounts_for_the_whole_step_and_opens_as_a_trace(tmp_path: Path, capsys: Any):
    model, out, trace = save_tiny_model(tmp_path), tmp_path / "out.json", tmp_path / "trace.json"
    wanted = ("--engines", "fast", "transformers", "gated", "--nominal", "2", "--batches", "2", "--rounds", "1")
    assert bench(model, *wanted, "--out", str(out), "--profile", str(trace)) == 0
    assert "ms a step (" in capsys.readouterr().out
    rows = json.loads(out.read_text())["profile"]
    for engine, nominal in [("fast", 1), ("fast", 2), ("transformers", 1), ("gated", 1), ("gated", 2)]:
        mine = {r["kind"]: r for r in rows if (r["engine"], r["nominal_speedup"]) == (engine, nominal)}
        assert sum(r["share"] for r in mine.values()) == pytest.approx(1)
        named = {"qkv", "attention", "out", "mlp_in", "mlp_out", "embed", "layers", "head", "sampling"}
        assert named <= set(mine) if engine == "fast" else "aten::mm" in mine or "aten::addmm" in mine
        if engine == "fast":
            assert mine["layers"]["calls_per_step"] == mine["head"]["calls_per_step"] == 1
        elif nominal == 2:  # operators run for the layers that run
            (full,) = (r for r in rows if (r["kind"], r["engine"], r["nominal_speedup"]) == ("aten::mm", engine, 1))
            assert mine["aten::mm"]["calls_per_step"] < full["calls_per_step"]
    document = json.loads(trace.read_text())
    assert document["profile"] == rows
    events = document["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    assert sum(e["pid"] == 1 and e["name"] == "layers" for e in events) == 8


@pytest.mark.parametrize("engine", ["fast", "transformers"])
def test_a_profiled_model_is_left_as_it_was(engine: str):
    model = tiny_model("llama")
    backend = open_backend(engine, model)
    before = {m: dict(m.__dict__) for m in model.modules()}
    assert profile([backend], Workload((1,), (6,), 5, (), 1))["rows"]
    for module, held in before.items():
        assert module.__dict__.keys() == held.keys()
    assert sum(step_seconds(backend, Schedule.full(LAYERS), Shape(1, 6, 5))) > 0


def test_an_adapter_is_measured_as_it_decodes(tmp_path: Path):
    model, out = save_tiny_model(tmp_path / "model"), tmp_path / "out.json"
    save_adapter(tmp_path / "adapter", model)
    assert bench(str(tmp_path / "adapter"), "--nominal", "2", "--rounds", "1", "--out", str(out)) == 0
    assert {row["engine"] for row in json.loads(out.read_text())["rows"]} >= {"fast", "transformers"}


def test_engine_that_does_not_cover_the_model_is_refused(tmp_path: Path, capsys: Any):
    tiny_model("bloom").save_pretrained(tmp_path)
    assert bench(str(tmp_path), "--engines", "fast", "--nominal", "2") == 2
    assert "does not cover this model" in capsys.readouterr().err.splitlines()[-1]
