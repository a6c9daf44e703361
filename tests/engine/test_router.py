"""Routers: made from records, and a schedule for each request of `generate` and `serve`, whatever batch it is in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_tools import NESTED, greedy, offline, running, tiny_served_model, tiny_service
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.engine.router import Measured, Router, fit_router
from skipdecode.errors import DataError, TargetError, UsageError
from skipdecode.models.loading.base_weights import base_sample
from skipdecode.models.loading.hub import load_model
from skipdecode.performance.cost import CostModel
from textgen_tools import read_rows, save_tiny_model, write_rows
from tiny import LAYERS
from tuning_data import records, save_model, write_jsonl

FULL = Schedule.full(LAYERS)
PROMPTS = ["one", "a longer prompt", "two", "the longest prompt that there is here", "hm", "another long prompt"]


def router_by_length(model: Any, longest: int = 8, schedules: tuple[Schedule, ...] = (FULL, NESTED)) -> Router:
    """Prompts of up to so many tokens run the second schedule, longer ones the first."""
    weights = ((1.0, *([0.0] * 16), -math.log(longest + 0.5)),)
    return Router(schedules, (1.0, 0.5), weights, 0.0, tuple(base_sample(model)))


def measured(count: int = 200) -> Measured:
    """Every other record loses a nat a token more under the second schedule, and its first feature tells."""
    random = np.random.default_rng(1)
    hard = np.arange(count) % 2
    features = random.normal(size=(count, 17)) + np.outer(hard, [3.0, *([0.0] * 16)])
    tokens = random.integers(5, 20, count).astype(float)
    losses = np.column_stack([2 * tokens, (2 + hard) * tokens])
    seconds = np.column_stack([np.ones(count), np.full(count, 0.5)])
    return Measured(features, losses, seconds, tokens, np.ones(count))


def test_a_router_beats_any_mix_where_the_prompt_tells_what_is_hard() -> None:
    router, found = fit_router((FULL, NESTED), measured(), 1.3, [0.5] * 64)
    assert found.speedup >= 1.3
    assert found.shares == pytest.approx((0.5, 0.5), abs=0.1)
    assert found.low > 0.1
    assert found.gain == pytest.approx(found.static - found.loss)
    assert router.weights[0][0] > 0  # the feature of hard ones
    with pytest.raises(TargetError, match=r"the fastest of the schedules has 2\.00x"):
        fit_router((FULL, NESTED), measured(), 2.5, [])


def test_a_router_gains_nothing_where_the_prompt_tells_nothing() -> None:
    table = measured()
    noise = np.random.default_rng(2).normal(size=table.features.shape)
    _, found = fit_router((FULL, NESTED), table._replace(features=noise), 1.3, [])
    assert found.low < 0 < found.high


@pytest.mark.parametrize("engine", ["fast", "transformers"])
def test_each_row_runs_the_schedule_that_its_prompt_chooses_in_any_batch(engine: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    router_by_length(load_model(model).model).save(tmp_path / "router.json")
    NESTED.save(tmp_path / "nested.json")
    FULL.save(tmp_path / "full.json")
    data = write_rows(tmp_path / "in.jsonl", [{"id": i, "prompt": p} for i, p in enumerate(PROMPTS)])

    def rows(name: str, *more: str) -> list[Any]:
        out = tmp_path / f"{name}.jsonl"
        command = ["generate", model, "--input", data, "--output", str(out), "--max-new-tokens", "8", *more]
        assert main([*command, "--engine", engine, "--dtype", "float32"]) == 0
        return read_rows(out)

    router = ["--router", str(tmp_path / "router.json")]
    routed = rows("routed", *router, "--batch-size", "4")
    assert [row["schedule"] for row in routed] == ["nested" if len(p) <= 8 else "full" for p in PROMPTS]
    assert rows("alone", *router, "--batch-size", "1") == routed
    plain = {s: rows(s, "--schedule", str(tmp_path / f"{s}.json")) for s in ("nested", "full")}
    assert routed == [plain[row["schedule"]][i] | {"schedule": row["schedule"]} for i, row in enumerate(routed)]
    assert plain["nested"] != plain["full"]


def test_a_router_is_made_from_records_and_used(tmp_path: Path, capsys: Any) -> None:
    model = str(save_model(tmp_path / "model"))
    data = str(write_jsonl(tmp_path / "data.jsonl", records(24)))
    Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=5, seq_len=8).save(tmp_path / "paper.json")
    cost = CostModel.of_step(LAYERS, 1, 0.0, 1.0)
    (tmp_path / "cost.json").write_text(json.dumps(cost.to_dict()))
    fields = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref", "--batch-size", "4"]
    command = ["calibrate", model, "--data", data, "--out", str(tmp_path / "out"), *fields, "--resume"]
    command += ["--router", "full", str(tmp_path / "paper.json"), "--target-speedup", "1.05"]
    command += ["--cost", str(tmp_path / "cost.json")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "by the cost model; full " in printed
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speedup"] >= 1.05
    assert sum(found["shares"]) == pytest.approx(1)
    router = str(tmp_path / "out" / "router.json")
    assert main(["generate", model, "blue cup", "--router", router, "--max-new-tokens", "4"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["schedule"] in found["schedules"]


def test_the_server_routes_requests_that_ask_for_it() -> None:
    service = tiny_service()
    service.catalog.route = router_by_length(tiny_served_model()).bind(tiny_served_model())
    with running(service) as client:
        for prompt in PROMPTS:
            name = "nested" if len(prompt) <= 8 else "full"
            body = greedy(prompt=prompt, max_tokens=8, skipdecode={"schedule": "routed"})
            answer = client.post("/v1/completions", json=body).json()
            assert answer["skipdecode"]["schedule"] == name
            assert answer["choices"][0]["text"] == offline(prompt, 8, NESTED if name == "nested" else FULL)[1]
        body = greedy(prompt=PROMPTS[:2], max_tokens=8, skipdecode={"schedule": "routed"})
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert "for requests of one prompt, not of 2" in refused.json()["error"]["message"]


def test_a_router_of_other_weights_or_of_no_use_is_refused(tmp_path: Path) -> None:
    model = tiny_served_model()
    router = router_by_length(model)
    router.save(tmp_path / "router.json")
    assert Router.load(tmp_path / "router.json") == router
    with pytest.raises(UsageError, match="other weights"):
        router.bind(tiny_served_model("qwen2"))
    (tmp_path / "router.json").write_text(json.dumps(router.to_dict() | {"costs": [1.0]}))
    with pytest.raises(DataError, match=r"router .*router.json: two schedules or more are needed"):
        Router.load(tmp_path / "router.json")
    (tmp_path / "router.json").write_text("{}")
    with pytest.raises(DataError, match="this is no router"):
        Router.load(tmp_path / "router.json")
