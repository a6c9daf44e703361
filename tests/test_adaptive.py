"""Depth by difficulty: rows choose depths that the oracle bears out, alone and in any batch; bad routers are told."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import byte_tokenizer, save_checkpoint
from oracle import active_tokens, oracle_logits
from routers import ORDER, router_for
from serve_tools import running, tiny_served_model
from skipdecode import LLM, Schedule, attach
from skipdecode.calibration.adaptive import (
    NEVER,
    DepthTable,
    find_router,
    find_thresholds,
    follow,
    oracle,
    penalties,
    routed,
    static_shares,
)
from skipdecode.cli import main
from skipdecode.cli.adaptive import _depths
from skipdecode.cli.calibrate import Config
from skipdecode.engine import FastEngine, GatedEngine, Request, Sampling
from skipdecode.engine.adaptive import Adaptive, Router
from skipdecode.engine.depth import WAYS
from skipdecode.errors import DataError, ScheduleError, TargetError, UsageError
from skipdecode.models.carried import keep_tuned
from skipdecode.models.loading.hub import load_model
from skipdecode.performance.cost import CostModel
from skipdecode.performance.simulate.traces import read_recorded
from skipdecode.serving.service import open_service
from textgen_tools import read_rows, write_rows
from tiny import LAYERS, VOCAB, tiny_model
from tuning_data import records, tuning_model, write_jsonl

NEW = 12


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 14, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


PROMPTS = prompts(23)


def decoded(engine: Any, rows: list[tuple[int, ...]], cancel: tuple[int, ...] = ()) -> list[list[Any]]:
    """The steps of each row; those to cancel leave after their third token."""
    sampling = Sampling(top_logprobs=VOCAB)
    numbers = engine.submit([Request(row, NEW, sampling) for row in rows])
    steps: dict[int, list[Any]] = {number: [] for number in numbers}
    while engine.has_work:
        for out in engine.step():
            steps[out.request].append(out)
            if out.request in cancel and out.position == 2:
                engine.cancel(out.request)
    return [steps[number] for number in numbers]


def summary(rows: list[list[Any]]) -> list[list[tuple[int, int]]]:
    return [[(out.token, out.layers) for out in row] for row in rows]


def replayed(model: Any, adaptive: Adaptive, prompt: tuple[int, ...], row: list[Any]) -> torch.Tensor:
    """Log-probabilities of each new token by the oracle, under the layers that the row says it ran."""
    budgets = [out.layers for out in row[1:]]
    fixed = replace(adaptive.router.depths[0], budgets=tuple(budgets), name="replay")
    text = torch.tensor([[*prompt, *(out.token for out in row[:-1])]])
    active = active_tokens(fixed, len(prompt), text.shape[1])
    # The choice is made after it: the last prompt token runs what the deepest depth has there.
    active[list(adaptive.router.depths[0].last_prompt_layers()), len(prompt) - 1] = True
    with torch.no_grad():
        return oracle_logits(model, text, torch.ones_like(text), active)[0, len(prompt) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", ["full", (0, 1, 2, 3)])
def test_chosen_depths_replayed_through_the_oracle_give_the_same_text(way: str, prompt: Any) -> None:
    model = tiny_model("llama")
    adaptive = Adaptive.choosing(router_for(model, prompt), way)
    rows = decoded(FastEngine(tiny_model("llama"), adaptive, max_rows=4, join_below=0.25), PROMPTS)
    for text, row in zip(PROMPTS, rows, strict=True):
        expected = replayed(model, adaptive, text, row)
        got = torch.empty_like(expected)
        for place, out in enumerate(row):
            for token, logprob in out.top:
                got[place, token] = logprob
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        assert [out.token for out in row] == expected.argmax(-1).tolist()
    layers = [tuple(out.layers for out in row[1:]) for row in rows]
    assert len(set(layers)) > 2
    assert all(later <= earlier for row in layers for earlier, later in pairwise(row))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", ["full", (0, 1, 2, 3)])
def test_a_row_chooses_the_same_alone_in_any_batch_and_beside_rows_that_leave(way: str, prompt: Any) -> None:
    model = tiny_model("llama")
    adaptive = Adaptive.choosing(router_for(model, prompt), way)
    alone = [summary(decoded(FastEngine(model, adaptive, max_rows=1), [row]))[0] for row in PROMPTS]
    for options in ({"max_rows": 3, "join_below": 0.25}, {"max_rows": 64}, {"max_rows": 5, "join_below": 1.0}):
        assert summary(decoded(FastEngine(model, adaptive, **options), PROMPTS)) == alone
    queue = FastEngine(model, adaptive, max_rows=4, join_below=1, in_order=True, prompt_tokens=8, prefix_cache=True)
    assert summary(decoded(queue, PROMPTS)) == alone
    gone = (1, 4, 9, 10)
    some = summary(decoded(FastEngine(model, adaptive, max_rows=3, join_below=0.25), PROMPTS, gone))
    assert [row for n, row in enumerate(some) if n not in gone] == [row for n, row in enumerate(alone) if n not in gone]


def test_rows_of_like_depth_step_together() -> None:
    model = tiny_model("llama")
    adaptive = Adaptive.choosing(router_for(model))
    many = prompts(160, seed=5)
    waves, mixed = (FastEngine(model, adaptive, max_rows=8, join_below=0.25, in_order=alike) for alike in (False, True))
    assert summary(decoded(waves, many)) == summary(decoded(mixed, many))
    assert waves.stats.token_layers == mixed.stats.token_layers
    assert waves.stats.layer_reads < 0.9 * mixed.stats.layer_reads


def test_an_engine_keeps_to_its_rows_when_they_choose_no_more() -> None:
    model = tiny_model("llama")
    adaptive, plain = Adaptive.choosing(router_for(model)), Schedule(LAYERS, ORDER, (6, 5, 4))
    engine, most = FastEngine(model, plain, max_rows=3), []
    for schedule in (adaptive, plain):
        engine.submit([Request(row, NEW) for row in PROMPTS], schedule)
        begun = 0
        while engine.has_work:
            engine.step()
            begun = max(begun, engine.rows)
        most.append(begun)
    assert most[0] > 3 == most[1]


@pytest.mark.parametrize("prompt", ["full", (0, 1, 2, 3)])
def test_the_gated_engine_decides_alike_and_runs_the_deepest_rows_depth(prompt: Any) -> None:
    model = tiny_model("llama")
    adaptive = Adaptive.choosing(router_for(model, prompt))
    fast = summary(decoded(FastEngine(tiny_model("llama"), adaptive, max_rows=1), PROMPTS))
    assert summary(decoded(GatedEngine(model, adaptive, max_rows=1), PROMPTS)) == fast
    together = summary(decoded(GatedEngine(model, adaptive, max_rows=4, in_order=True), PROMPTS[:4]))
    deepest = [max(layers) for layers in zip(*([layers for _, layers in row] for row in fast[:4]), strict=True)]
    assert [[layers for _, layers in row] for row in together] == [deepest] * 4


def test_rows_that_sample_choose_and_draw_the_same_in_any_batch() -> None:
    adaptive = Adaptive.choosing(router_for(tiny_model("llama")), "adaptive+confident")

    def rows(most: int) -> list[list[tuple[int, int]]]:
        engine = FastEngine(tiny_model("llama"), adaptive, max_rows=most, join_below=0.25)
        requests = [Request(row, NEW, Sampling(temperature=0.8, top_k=20, seed=n)) for n, row in enumerate(PROMPTS)]
        steps: list[list[tuple[int, int]]] = [[] for _ in requests]
        for out in engine.run(requests):
            steps[out.request].append((out.token, out.layers))
        return steps

    assert rows(1) == rows(4) == rows(64)


def test_attach_refuses_a_schedule_that_chooses() -> None:
    model = tiny_model("llama")
    adaptive = Adaptive.choosing(router_for(model))
    with pytest.raises(ScheduleError, match="'adaptive' chooses"):
        attach(model, adaptive)
    with attach(model, adaptive.router.depths[1]) as attachment, pytest.raises(ScheduleError, match="'adaptive'"):
        attachment.schedule = adaptive


def test_bounds_of_a_request_move_its_depth() -> None:
    model = tiny_model("llama")
    router = router_for(model)
    known = [0.3] * 36

    def depth(**bounds: Any) -> int:
        return Adaptive.choosing(router, **bounds).first_depth(known)

    excess = router.excess(known)
    for bound in (0.0, *sorted(abs(loss) for loss in excess)):
        assert depth(max_loss=bound) == max(i for i, loss in enumerate(excess) if loss <= bound)
    assert depth(speedup=2.0) >= depth(speedup=1.0)
    late = replace(router, penalties=((1.5, 0.0), (2.0, 4.0)))  # free of charge it is faster than its target
    assert Adaptive.choosing(late).penalty == 0
    with pytest.raises(UsageError, match="reach"):
        Adaptive.choosing(router, speedup=3.0)
    with pytest.raises(UsageError):
        Adaptive.choosing(router, speedup=1.5, max_loss=0.1)
    with pytest.raises(UsageError, match="features"):
        router.excess(known[:4])


# ---------------------------------------------------------------------- routers on disk


def test_a_router_comes_back_from_its_file_and_broken_ones_are_refused(tmp_path: Path) -> None:
    model, file = tiny_model("llama"), tmp_path / "router.json"
    router = router_for(model)
    router.save(file, figures={"anything": 1})
    assert Router.load(file) == router
    router.check(model)
    data = json.loads(file.read_text())
    for change in ({"kind": "schedule"}, {"format": 9}, {"costs": [1.0]}, {"weights": [[0.0]]}, {"depths": [{}]}):
        file.write_text(json.dumps(data | change))
        with pytest.raises(DataError, match=r"router\.json"):
            Router.load(file)
    for name in ("weights", "model", "depths"):
        file.write_text(json.dumps({key: value for key, value in data.items() if key != name}))
        with pytest.raises(DataError, match=name):
            Router.load(file)
    file.write_text("{")
    with pytest.raises(DataError):
        Router.load(file)


def test_a_router_for_another_model_order_or_vocabulary_is_refused() -> None:
    router = router_for(tiny_model("llama"))
    with pytest.raises(UsageError, match="vocabulary"):
        router.check(tiny_model("llama", vocab_size=VOCAB + 4))
    with pytest.raises(UsageError, match="layers"):
        router.check(tiny_model("llama", num_hidden_layers=4))
    with pytest.raises(UsageError, match="weights"):
        router.check(tiny_model("llama", seed=1))
    model = tiny_model("llama")
    keep_tuned(model, (Schedule(LAYERS, (6, 5), (6,), name="top"),))
    with pytest.raises(UsageError, match="order"):
        router.check(model)


def test_depths_that_rows_cannot_go_through_are_refused() -> None:
    model = tiny_model("llama")
    deep, *rest = router_for(model).depths
    for wrong in (
        replace(rest[0], drop_order=(6, 5, 4, 3)),
        replace(rest[0], prompt=(0, 1)),
        replace(deep, budgets=(2,)),
    ):
        with pytest.raises(ScheduleError):
            router_for(model, depths=(deep, wrong, *rest[1:]))


@pytest.mark.parametrize(("carried", "found"), [("full", [8, 4, 3]), ((0, 1, 2, 3), [8, 4, 3])])
def test_depths_of_a_checkpoint_are_those_of_the_prompts_that_it_carries(
    tmp_path: Path, carried: Any, found: list[int]
) -> None:
    target = replace(Schedule(LAYERS, (6, 5, 4, 3, 2), (3,), name="deep-3x"), prompt=carried)
    save_checkpoint(tmp_path, target.to_dict())
    sampled = {"curriculum": "sampled", "sampled_speedups": [1, 2], "sampled_prompts": ["4", "full"]}
    (tmp_path / "recipe.json").write_text(json.dumps({"options": sampled, "schedule": target.to_dict()}))
    loaded = load_model(str(tmp_path))
    assert loaded.recipe is not None
    assert len(loaded.recipe.tuned_under) == 5
    depths = _depths(Config(model="m", data="d", out="o", target_speedup=1.2), loaded)
    assert [each.budget(0) for each in depths] == found
    assert {each.prompt_layers() for each in depths} == {target.prompt_layers()}


# ---------------------------------------------------------------------- what is learned


class _Meter:
    """Losses as they are planned: even records lose nothing at the shallow depth, odd ones much."""

    def records(self, depths: Any) -> list[dict[str, Any]]:
        random, found = np.random.RandomState(0), []
        for n in range(120):
            hard, tokens = n % 2, 5 + n % 3
            signal = [float(hard) + 0.1 * random.randn(), *random.randn(35).tolist()]
            losses = [[1.0] * tokens, [1.0 + 0.1 * hard] * tokens, [1.0 + hard] * tokens]
            likely = [[-0.1 - 2.0 * hard] * tokens for _ in depths]
            found.append({"prompt": 10, "features": signal, "losses": losses, "likely": likely})
        return found


@pytest.fixture
def table() -> DepthTable:
    depths = [Schedule.constant(LAYERS, n) for n in (8, 6, 2)]
    return DepthTable(depths, {"odd": _Meter(), "even": _Meter()}, CostModel.of_step(LAYERS, 1, 1.0, 1.0))  # type: ignore[dict-item]


def test_the_oracle_and_the_router_find_the_records_that_bear_less(table: DepthTable) -> None:
    possible = {(each["task"], each["method"]): each for each in oracle(table, 1.1)}
    best, random = possible["all", "oracle"], possible["all", "random"]
    assert best["request_speedup"] >= 1.1 - 1e-9
    assert best["loss"] == pytest.approx(1.0, abs=0.01)  # only those that lose nothing went down
    assert best["gain"] > 0.05
    assert best["low"] > 0
    assert random["gain"] <= 1e-9
    assert {task for task, _ in possible} == {"all", "odd", "even"}
    weights, predicted = find_router(table)
    choice, _ = routed(table, predicted, 1.1)
    (found, *_) = table.chosen("adaptive", choice)
    again = np.column_stack([table.features, np.ones(len(choice))]) @ weights.T
    assert np.abs(again - predicted[:, 1:]).mean() < 0.1  # of the same fit, but for the record itself
    assert found["request_speedup"] >= 1.1 - 1e-9
    assert found["gain"] > 0.8 * best["gain"]
    speedups = [speedup for speedup, _ in penalties(table, predicted)]
    assert speedups == sorted(speedups)
    with pytest.raises(TargetError):
        oracle(table, 9.0)


def test_static_takes_the_best_depth_or_mix_of_two_within_the_time() -> None:
    losses, seconds = np.array([2.0, 3.0, 7.0]), np.array([8.0, 6.0, 2.0])
    for at, shares in ((9, (1, 0, 0)), (8, (1, 0, 0)), (7, (0.5, 0.5, 0)), (4, (0, 0.5, 0.5)), (1, (0, 0, 1))):
        np.testing.assert_allclose(static_shares(losses, seconds, at), shares)


def test_thresholds_send_sure_records_down(table: DepthTable) -> None:
    thresholds = find_thresholds(table, 1.1)
    assert thresholds is not None
    begun = np.zeros(len(table.counts), dtype=np.intp)
    losses, seconds, layers = follow(table, thresholds, begun)
    assert table.full.sum() / seconds.sum() >= 1.1 - 1e-9
    assert losses.sum() / table.counts.sum() == pytest.approx(1.0, abs=0.01)
    assert layers[0] < layers[1] == 8
    still = follow(table, (NEVER, NEVER), begun)
    np.testing.assert_allclose(still[0], table.sums[:, 0])
    np.testing.assert_allclose(still[1], table.seconds[:, 0])


# ---------------------------------------------------------------------- the server


def test_the_server_chooses_as_offline_and_takes_bounds(tmp_path: Path) -> None:
    model = tiny_served_model()
    adaptive = Adaptive.choosing(router_for(model), "adaptive")
    service = open_service(model, byte_tokenizer(), name="tiny", others=(adaptive,), engine="fast")
    offline = FastEngine(tiny_served_model(), adaptive, max_rows=1)
    body = {"max_tokens": 8, "temperature": 0}

    def ask(client: Any, prompt: tuple[int, ...], **extension: Any) -> Any:
        answer = client.post("/v1/completions", json=body | {"prompt": list(prompt), "skipdecode": extension})
        return answer.json() if answer.status_code == 200 else answer.status_code

    with running(service) as client, ThreadPoolExecutor(8) as pool:
        some = PROMPTS[:12]
        answers = list(pool.map(lambda prompt: ask(client, prompt, schedule="adaptive", trace=True), some))
        for prompt, answer in zip(some, answers, strict=True):
            (row,) = offline.decode([Request(prompt, 8, stop_ids=frozenset({2}))])
            tokens = answer["choices"][0]["skipdecode"]["tokens"]
            assert [token["id"] for token in tokens] == row.tokens
            assert answer["skipdecode"]["depths"] == [token["layers"] for token in tokens[1:2]]
        assert len({answer["skipdecode"]["depths"][0] for answer in answers}) > 1
        deepest = [ask(client, prompt, schedule="adaptive", max_loss=0)["skipdecode"]["depths"][0] for prompt in some]
        shallow = [ask(client, prompt, schedule="adaptive", max_loss=9)["skipdecode"]["depths"][0] for prompt in some]
        assert all(a >= b for a, b in zip(deepest, shallow, strict=True))
        assert set(shallow) == {3}
        for wrong in ({"speedup": 9}, {"speedup": 1.5, "max_loss": 1}):
            assert ask(client, PROMPTS[0], schedule="adaptive", **wrong) == 400
        assert ask(client, PROMPTS[0], schedule="full", max_loss=1) == 400
        assert 'skipdecode_first_depth_count{schedule="adaptive"}' in client.get("/metrics").text
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    recorded = read_recorded(tmp_path / "answers.jsonl")
    assert [prompt for prompt, _ in recorded] == [len(prompt) for prompt in some]
    assert [layers[:1] for _, layers in recorded] == [answer["skipdecode"]["depths"] for answer in answers]


# ---------------------------------------------------------------------- the command line


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model that calibrate --adaptive has made a router for, in a directory of its own."""
    where = tmp_path_factory.mktemp("adaptive")
    tuning_model().save_pretrained(where / "model")
    byte_tokenizer().save_pretrained(where / "model")
    (where / "cost.json").write_text(json.dumps({"cost": CostModel.of_step(LAYERS, 4, 1.0, 1.0).to_dict()}))
    rows = [r | {"thing": f"{r['thing']} {n}"} for n, r in enumerate(records(40))]
    data = str(write_jsonl(where / "data.jsonl", rows))
    fields = ["--prompt-template", "{colour} {thing}\\n", "--response-field", "ref", "--records", "24"]
    common = [
        "calibrate",
        str(where / "model"),
        "--data",
        data,
        *fields,
        "--adaptive",
        "--cost",
        str(where / "cost.json"),
    ]
    out = str(where / "out")
    assert main([*common, "--out", out, "--depths", "8", "5", "3", "--target-speedup", "1.3"]) == 0
    prompts = write_rows(where / "in.jsonl", [{"id": n, "prompt": f"row {n * 7}"} for n in range(40)])
    router = str(where / "out" / "router.json")
    return {"model": str(where / "model"), "common": json.dumps(common), "router": router, "input": prompts}


def test_calibrate_makes_a_router_that_generate_takes_and_resumes(made: dict[str, str], tmp_path: Path) -> None:
    def generate(out: Path, *more: str) -> int:
        options = ["--input", made["input"], "--output", str(out), "--max-new-tokens", "8", *more]
        return main(["generate", made["model"], *options, "--schedule", "adaptive", "--router", made["router"]])

    whole, alone, cut = (tmp_path / name for name in ("whole.jsonl", "alone.jsonl", "cut.jsonl"))
    assert generate(whole, "--batch-size", "4") == 0
    assert generate(alone, "--batch-size", "1") == 0
    rows = read_rows(whole)
    assert rows == read_rows(alone)
    assert all(len(row["layers"]) == row["new_tokens"] - 1 for row in rows)
    assert {layers for row in rows for layers in row["layers"]} <= {8, 5, 3}
    steps, step = [0], FastEngine.step

    def interrupted(engine: FastEngine) -> Any:
        steps[0] += 1
        if steps[0] == 30:
            raise KeyboardInterrupt
        return step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastEngine, "step", interrupted)
        assert generate(cut, "--batch-size", "4") == 130
    assert 2 < Path(f"{cut}.partial").read_bytes().count(b"\n") < 40
    assert generate(cut, "--batch-size", "4") == 0
    assert cut.read_bytes() == whole.read_bytes()


def test_python_takes_the_checkpoint_s_router_by_name(made: dict[str, str], tmp_path: Path) -> None:
    where = tmp_path / "model"
    shutil.copytree(made["model"], where)
    prompts = [row["prompt"] for row in read_rows(made["input"])]
    with pytest.raises(ScheduleError, match="adaptive"):
        LLM(where).generate(prompts, 8, schedule="adaptive")
    shutil.copy(made["router"], where)
    llm = LLM(where, max_rows=4)
    outputs = llm.generate(prompts, 8, schedule="adaptive")
    fixed = [llm.generate(prompts, 8, schedule=depth) for depth in Router.load(where / "router.json").depths]
    assert 3 < (outputs.stats.mean_layers or 0) < 8
    for one, *others in zip(outputs, *fixed, strict=True):
        assert one.tokens in [other.tokens for other in others]
    named = Adaptive.choosing(Router.load(where / "router.json"), "confident")
    alone = LLM(made["model"], named)  # as chat --router has it
    assert alone.schedule_of("confident") == named
    assert "adaptive" not in alone.schedules
    router = json.loads((where / "router.json").read_text())
    (where / "router.json").write_text(json.dumps(router | {"model": router["model"] | {"layers": 12}}))
    with pytest.raises(UsageError, match="layers"):
        LLM(where)


def test_recorded_depths_are_simulated_as_they_ran(made: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    out, adaptive = tmp_path / "rows.jsonl", ["--schedule", "adaptive", "--router", made["router"]]
    options = ["--input", made["input"], "--output", str(out), "--max-new-tokens", "8", "--batch-size", "4"]
    summary = tmp_path / "summary.json"
    assert main(["generate", made["model"], *options, *adaptive, "--summary", str(summary)]) == 0
    (tmp_path / "cost.json").write_text(json.dumps(CostModel.of_step(LAYERS, 4, 1.0, 1.0).to_dict()))
    capsys.readouterr()
    simulate = ["simulate", "--cost", str(tmp_path / "cost.json"), "--traces", str(out)]
    job = ["--requests", "40", "--policy", "waves", "--join-below", "0.25"]
    assert main([*simulate, *job, "--nominal-speedup", "2", "--json"]) == 0
    full, paper, recorded = json.loads(capsys.readouterr().out)["runs"]
    assert [full["name"], recorded["name"]] == ["full", "recorded"]
    rows, ran = read_rows(out), json.loads(summary.read_text())["summary"]
    assert full["new_tokens"] == paper["new_tokens"] == recorded["new_tokens"] == sum(r["new_tokens"] for r in rows)
    assert full["prompt_tokens"] == recorded["prompt_tokens"] == sum(r["prompt_tokens"] for r in rows)
    assert recorded["layers_per_token"] == pytest.approx(ran["mean_layers_per_token"])
    assert main([*simulate, *job]) == 0
    assert f"recorded: {full['seconds'] / recorded['seconds']:.2f}x the requests/s" in capsys.readouterr().out
    # Rows of one depth step together in a batch job; in a stream a step runs the deepest row's layers.
    assert main([*simulate, "--requests", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][1]["layers_per_step"] > recorded["layers_per_step"]
    out.write_text('{"text": "no depths"}\n')
    for more in ([], ["--new-tokens", "9"]):
        assert main([*simulate, *more]) == 2
        assert ("--new-tokens" if more else "line 1") in capsys.readouterr().err


def test_eval_says_that_weights_are_not_tuned_under_a_router_s_depths(
    made: dict[str, str], tmp_path: Path, capsys: Any
) -> None:
    data = write_rows(tmp_path / "data.jsonl", [{"prompt": f"row {n}", "reference": "ok"} for n in range(4)])
    options = ["--task", "jsonl", "--data", data, "--router", made["router"], "--metrics", "rougeL"]
    options += ["--max-new-tokens", "4", "--no-full-depth", "--out", str(tmp_path / "out")]
    assert main(["eval", made["model"], "--methods", "adaptive", *options]) == 0
    assert "not tuned under adaptive" in capsys.readouterr().err


def test_a_router_of_another_model_is_told_in_one_line(made: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    router = json.loads(Path(made["router"]).read_text())
    known = router["model"]
    changes = {"layers": 4, "vocabulary": 7, "weights": [value + 1 for value in known["weights"]]}
    for name, value in changes.items():
        other = tmp_path / f"{name}.json"
        other.write_text(json.dumps(router | {"model": known | {name: value}}))
        assert main(["generate", made["model"], "hello", "--schedule", "adaptive", "--router", str(other)]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "the router" in line]
        assert name in line


def test_calibrate_says_what_it_cannot_do(made: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    common, out = json.loads(made["common"]), ["--out", str(tmp_path / "out")]
    wrong = (
        (["--depths", "8", "5"], "--target-speedup"),
        (["--depths", "8", "5", "--nominal-speedup", "2"], "--target-speedup"),
        (["--depths", "8", "5", "--target-speedup", "1.2", "--phase", "decode"], "--phase"),
        (["--depths", "8", "5", "--target-speedup", "9"], "out of reach"),
        (["--depths", "8", "--target-speedup", "1.2"], "--depths"),
        (["--target-speedup", "1.2"], "--depths"),
        (["--target-speedup", "1.2", "--mixture", "e2e"], "--mixture"),
        (["--depths", "8", "5", "--target-speedup", "1.2", "--batch", "2"], "batches of 4"),
    )
    for more, said in wrong:
        assert main([*common, *out, *more, "--resume"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("skipdecode: ")]
        assert said in line
    for name in ("--schedule adaptive", "--schedule full.json --router x.json", "--router x.json"):
        assert main(["generate", made["model"], "hello", *name.split()]) == 2
        assert "router" in capsys.readouterr().err
