"""The simulator against arithmetic done by hand, queueing theory, the cost model, and the real engine."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode.cli import main
from skipdecode.errors import DataError, ScheduleError, UsageError
from skipdecode.performance.cost import CostModel, PromptCost, StepCost
from skipdecode.performance.simulation import POLICIES, Simulation, capacity, simulate, spread
from skipdecode.performance.traces import Arrival, bursts, make_trace, parse_lengths
from skipdecode.schedule import Schedule

LAYERS = 8
PAPER = Schedule.from_speedup(LAYERS, 2, 12)
FULL = Schedule.full(LAYERS)
MODELS = [
    CostModel.of_step(LAYERS, 1, 0.010, 0.0020, 1.0e-5),
    CostModel.of_step(LAYERS, 4, 0.012, 0.0026, 0.8e-5),
    CostModel.of_step(LAYERS, 8, 0.016, 0.0040, 0.6e-5),
]
COST = replace(CostModel.joined(MODELS), prompts=(PromptCost.of_token(1e-4, 0.0020),))


def requests(*sizes: tuple[float, int, int]) -> list[Arrival]:
    return [Arrival(seconds, prompt, new, new) for seconds, prompt, new in sizes]


# ---------------------------------------------------------------------- by hand


def test_two_requests_by_hand():
    cost = CostModel(2, 2, (StepCost(1, 1, 2), StepCost(2, 1, 3)), (PromptCost(1000, 5),))
    schedule = Schedule(2, (0,), (2, 1), warmup_layers=0)
    # 0: prompt 1 + 2·5 -> 11. Step with 2 layers: 1 + 2·2 -> 16. Request 1 came at 12, joins: its prompt through both
    # layers and 0 through one -> 27, where 0 (3 tokens) ends. 1 goes on: 1 + 2·2 -> 32, and with one layer 1 + 2 -> 35.
    result = simulate(requests((0, 4, 3), (12, 4, 3)), cost, schedule, max_rows=2)
    assert result.seconds == pytest.approx(35)
    assert (result.stats.steps, result.stats.layer_reads, result.stats.token_layers) == (4, 6, 6)
    assert list(result.first_token) == pytest.approx([11, 15])
    assert list(result.whole) == pytest.approx([27, 23])
    assert sorted(result.between_tokens) == pytest.approx(sorted([16 - 11, 27 - 16, 32 - 27, 35 - 32]))
    assert result.busy == pytest.approx(1)
    # Of the shared forward's 11 s, 4·2 tokens x layers were the prompt's and one the row's.
    assert result.stats.prompt_seconds == pytest.approx(11 + 11 * 8 / 9)
    assert result.tokens_per_second == pytest.approx(6 / 35)


def test_a_prompt_in_chunks_shares_its_forwards_with_a_running_row_by_hand():
    cost = CostModel(1, 2, (StepCost(1, 0, 1), StepCost(2, 0, 2)), (PromptCost(1, 1),))
    # 0: prompt of 2 -> 2, step -> 3. 1 came at 2.5 with 5 tokens, 2 a forward, each with a token of row 0: -> 6, -> 9;
    # the last one and row 0's last -> 11; the second token of row 1 -> 12.
    result = simulate(requests((0, 2, 5), (2.5, 5, 2)), cost, Schedule.full(1), max_rows=2, prompt_chunk=2)
    assert result.seconds == pytest.approx(12)
    assert (result.stats.steps, result.stats.prompt_seconds, result.stats.after_prompts) == (5, 7, 5)
    assert list(result.first_token) == pytest.approx([2, 8.5])
    assert sorted(result.between_tokens) == pytest.approx([1, 1, 2, 3, 3])


def test_prompts_with_layers_of_their_own_share_forwards_by_hand():
    cost = CostModel(4, 2, (StepCost(1, 1, 2), StepCost(2, 1, 3)), (PromptCost(1000, 5, 0.5),))
    schedule = Schedule.split(4, 2, [3, 3], warmup_layers=1)
    # A prompt: 1 + 2·5, and layers 2 and 3 projected and run on its last token, 2·(0.5 + 2) -> 16. A step: 1 + 3·2.
    # 0: -> 16, -> 23. Request 1 came at 17. Its prompt shares a forward with row 0, which runs layers 0, 2 and 3: in
    # layers 2 and 3, 4 tokens are projected and two run, 1 + 2·5 + 2·(0.5 + 3) -> 41. 1's step alone -> 48.
    result = simulate(requests((0, 4, 3), (17, 4, 2)), cost, schedule, max_rows=2)
    assert list(result.whole) == pytest.approx([41, 31])
    assert list(result.first_token) == pytest.approx([16, 24])
    # In forwards of 3 tokens, row 0 gets its last token with the first part of 1's prompt: 1 + 2·5 + 2·(0.5 + 2) -> 39.
    # 1's second part -> 55, its step -> 62.
    parts = simulate(requests((0, 3, 3), (17, 4, 2)), cost, schedule, max_rows=2, prompt_chunk=3)
    assert list(parts.whole) == pytest.approx([39, 45])
    # With a fit: taps cost one more projection, and a bridge of a tenth of a layer is taken by row 0 in layer 1.
    fitted = simulate(requests((0, 4, 3), (18, 4, 2)), replace(cost, bridge_share=0.1, taps=1), schedule, max_rows=2)
    assert fitted.first_token[1] == pytest.approx(16 + 2 * 0.5 + 7 + 0.2 + 18 + 2 * 0.5 + 0.2 - 18)


def test_cached_tokens_are_read_to_the_window_by_hand():
    cost = CostModel(2, 1, (StepCost(1, 0, 0, 1),), (PromptCost(1000, 0),), window=4, window_share=0.5)
    # Steps find 3, 4, 5 and 6 tokens: one layer reads them all, the other 4 at most.
    result = simulate(requests((0, 2, 5)), cost, Schedule.full(2), max_rows=1)
    assert list(result.between_tokens) == pytest.approx([3 + 3, 4 + 4, 5 + 4, 6 + 4])


def test_waves_start_together_and_a_stream_fills_free_rows_by_hand():
    cost = CostModel(1, 2, (StepCost(1, 0, 1), StepCost(2, 0, 1)), (PromptCost(1000, 1),))
    sizes = requests((0, 1, 5), (0, 1, 3), (0, 1, 3))
    # Static batches: the two longest -> 1 .. 5 (the short one ends at 3), then the third alone: prompt -> 6, ends at 8.
    assert list(simulate(sizes, cost, Schedule.full(1), max_rows=2, policy="static").whole) == [3, 5, 8]
    # A stream: the third joins at 3, its prompt beside a token of the first -> 4; both step -> 5, the third -> 6.
    assert list(simulate(sizes, cost, Schedule.full(1), max_rows=2).whole) == [3, 5, 6]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=25),
    max_rows=st.integers(1, 8),
    policy=st.sampled_from(list(POLICIES)),
    schedule=st.sampled_from(
        [PAPER, FULL, PAPER.flattened(), replace(PAPER, prompt="max_exit"), replace(PAPER, prompt=(0, 1, 3))]
    ),
    chunk=st.sampled_from([7, 512]),
    workers=st.integers(1, 3),
)
def test_every_request_is_served_in_full(sizes, max_rows, policy, schedule, chunk, workers):
    clock, trace = 0.0, []
    for gap, prompt, new in sizes:
        clock += gap
        trace.append(Arrival(clock, prompt, new, new))
    result = simulate(trace, COST, schedule, max_rows=max_rows, policy=policy, prompt_chunk=chunk, workers=workers)
    assert result.finished == len(result.first_token) == len(result.whole) == len(trace)
    assert result.stats.prompt_tokens == sum(a.prompt_tokens for a in trace)
    assert result.stats.new_tokens == sum(a.new_tokens for a in trace)
    assert len(result.between_tokens) == result.stats.fed_tokens == result.stats.new_tokens - len(trace)
    assert sum(result.whole) == pytest.approx(sum(result.first_token) + sum(result.between_tokens))
    assert result.stats.token_layers == sum(schedule.budget(i) for a in trace for i in range(a.new_tokens - 1))
    assert result.busy <= 1 + 1e-9
    assert result.occupancy <= 1 + 1e-9


@pytest.mark.parametrize("schedule", [FULL, PAPER], ids=["full", "paper"])
@pytest.mark.parametrize("policy", POLICIES)
def test_lockstep_equals_the_cost_model(schedule, policy):
    model = replace(MODELS[1], window=30, window_share=0.25, bridge_share=0.25)
    result = simulate(requests(*[(0, 16, 40)] * 4), model, schedule, max_rows=4, policy=policy)
    assert result.stats.after_prompts == pytest.approx(model.sequence_seconds(schedule, 16, 40))
    assert result.layers_per_step == pytest.approx(model.layers_per_step(schedule, 40))


@pytest.mark.parametrize("prompt", ["full", "max_exit", (0, 1, 2)], ids=str)
def test_a_wave_of_whole_requests_equals_the_cost_model(prompt):
    schedule = replace(PAPER, prompt=prompt)
    cost = replace(MODELS[1], prompts=(PromptCost(64, 0.01, 0.001),), bridge_share=0.25, taps=1)
    result = simulate(requests(*[(0, 16, 40)] * 4), cost, schedule, max_rows=4, policy="static")
    assert result.seconds == pytest.approx(cost.request_seconds(schedule, 16, 40))


def test_continuous_with_one_row_equals_waves_of_one():
    trace = list(make_trace(50, bursts(3, 1, 1), parse_lengths("uniform:1:40"), parse_lengths("9"), seed=1))
    continuous, static = (simulate(trace, COST, PAPER, max_rows=1, policy=p) for p in ("continuous", "static"))
    assert continuous.seconds == pytest.approx(static.seconds)
    assert continuous.stats.steps == static.stats.steps == 50 * 8
    assert continuous.layers_per_step == continuous.layers_per_token


def test_one_row_with_equal_requests_waits_as_queueing_theory_says():
    service = simulate(requests((0, 10, 3)), COST, PAPER, max_rows=1).seconds
    load = 0.6
    trace = make_trace(20_000, bursts(load / service, 1, 3), parse_lengths("10"), parse_lengths("3"))
    result = simulate(trace, COST, PAPER, max_rows=1)
    # M/D/1 (Pollaczek-Khinchine): mean wait = load · service / (2 (1 - load)).
    wait = sum(result.whole) / len(result.whole) - service
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
    assert result.busy == pytest.approx(load, rel=0.02)


def test_least_loaded_routing_shares_the_work():
    trace = list(make_trace(64, None, parse_lengths("8"), parse_lengths("10")))
    alone = simulate(trace[:8], COST, PAPER)
    shared = simulate(trace, COST, PAPER, workers=8)
    assert shared.seconds == pytest.approx(alone.seconds)
    assert shared.busy == pytest.approx(1)
    assert shared.finished == 64


def test_mixed_ages_make_a_falling_schedule_run_more_layers_than_its_flat_twin():
    def stream(schedule):
        trace = make_trace(600, None, parse_lengths("uniform:8:16"), parse_lengths("uniform:4:20"))
        return simulate(trace, COST, schedule, max_rows=8)

    falling, flat = stream(PAPER), stream(PAPER.flattened())
    assert falling.layers_per_step > falling.layers_per_token + 0.5
    assert flat.layers_per_step == pytest.approx(flat.layers_per_token)


def test_capacity_is_what_an_overloaded_worker_finishes():
    def trace(n, times):
        return make_trace(n, times, parse_lengths("uniform:5:50"), parse_lengths("uniform:5:50"))

    most = capacity(trace(10**9, None), COST, FULL)
    assert simulate(trace(3000, bursts(3 * most, 1)), COST, FULL).requests_per_second == pytest.approx(most, rel=0.05)
    calm = simulate(trace(3000, bursts(0.5 * most, 1)), COST, FULL)
    assert calm.requests_per_second == pytest.approx(0.5 * most, rel=0.1)


def test_exact_decoding_gains_with_its_acceptance_and_costs_nothing_without_one():
    memory_bound = replace(COST, steps=tuple(StepCost(rows, 1e-3, 2e-3) for rows in (1, 2, 4, 8)), batch=8)
    trace = requests(*((0.0, 16, 40) for _ in range(8)))
    drafting = Schedule.even(LAYERS, 2)

    def run(acceptance: float | None, schedule: Schedule = drafting) -> tuple[float, Simulation]:
        found = simulate(trace, memory_bound, schedule, max_rows=1, acceptance=acceptance)
        assert (found.finished, found.stats.new_tokens) == (8, 320)
        return found.stats.after_prompts, found

    full, plain = run(None, FULL)
    always, found = run(1.0)
    sometimes, _ = run(0.5)
    never, missed = run(0.0)
    assert not plain.stats.drafted_tokens
    assert found.stats.accepted_tokens > 0.8 * found.stats.drafted_tokens > 100  # not the last token of each
    assert always < sometimes < full
    assert not missed.stats.accepted_tokens
    assert never == pytest.approx(full, rel=0.05)  # the planner stops drafting


@pytest.mark.parametrize("prompt", ["full", (0, 1, 2)], ids=str)
def test_the_real_engine_runs_the_steps_that_are_simulated(prompt):
    """Steps, layers and layer reads of the engine on a tiny model; its seconds are compared elsewhere."""
    import torch

    from skipdecode.engine import fast as engine_module
    from skipdecode.engine.requests import Request
    from tiny import tiny_model

    torch.set_num_threads(1)
    model = tiny_model("llama").eval()
    layers = model.config.num_hidden_layers
    rng = random.Random(4)
    trace = [Arrival(0.0, rng.randint(1, 12), n, n) for n in (rng.randint(1, 14) for _ in range(11))]
    cost = CostModel.of_step(layers, 3, 0.01, 0.001)
    schedule = Schedule.from_speedup(layers, 1.5, 10, prompt=prompt)
    for (policy, (refill_below, in_order)), chunk in itertools.product(POLICIES.items(), (7, 512)):
        engine = engine_module.FastEngine(
            model, schedule, max_rows=3, refill_below=refill_below, in_order=in_order, prompt_tokens=chunk
        )
        model = engine.model
        for _ in engine.run([Request((1,) * a.prompt_tokens, a.new_tokens) for a in trace]):
            pass
        got = simulate(trace, cost, schedule, max_rows=3, policy=policy, prompt_chunk=chunk)
        for name in ("steps", "prompt_tokens", "new_tokens", "token_layers", "layer_reads"):
            assert getattr(got.stats, name) == getattr(engine.stats, name), (policy, name)
    assert simulate.__kwdefaults__["prompt_chunk"] == engine_module.FastEngine.__init__.__kwdefaults__["prompt_tokens"]


# ---------------------------------------------------------------------- percentiles, traces


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_values_that_the_share_does_not_exceed(values):
    found, ordered = spread(values), sorted(values)
    for percent in (50, 90, 99):
        assert found[f"p{percent}"] == ordered[math.ceil(percent / 100 * len(values)) - 1]
    assert found["mean"] == pytest.approx(sum(values) / len(values))
    assert found["max"] == ordered[-1]
    assert set(spread([]).values()) == {0.0}


def test_traces_depend_on_the_seed_alone():
    def trace(seed, rate=5.0):
        return list(
            make_trace(
                300, bursts(rate, 3, seed), parse_lengths("lognormal:50:0.5"), parse_lengths("uniform:3:9"), seed=seed
            )
        )

    assert trace(1) == trace(1) != trace(2)
    assert [a[1:] for a in trace(1)] == [a[1:] for a in trace(1, rate=50)]
    assert all(len({a.seconds for a in trace(1)[i : i + 3]}) == 1 for i in range(0, 300, 3))
    assert trace(1)[-1].seconds == pytest.approx(60, rel=0.3)
    first, second = (simulate(trace(1), COST, PAPER, workers=3).to_dict() for _ in range(2))
    assert first == second


def test_lengths_in_words(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "lengths.json"
    path.write_text("[4, 4]")
    assert parse_lengths("7")(rng) == 7
    assert parse_lengths(f"file:{path}")(rng) == 4
    assert {parse_lengths("uniform:2:4")(rng) for _ in range(50)} == {2, 3, 4}
    drawn = sorted(parse_lengths("lognormal:100:0.3")(rng) for _ in range(999))
    assert drawn[499] == pytest.approx(100, rel=0.1)
    path.write_text("[4, 0]")
    for wrong in ("", "0", "x", f"file:{path}", "uniform:4:2", "uniform:1", "lognormal:0:1", "file:/nowhere"):
        with pytest.raises(UsageError):
            parse_lengths(wrong)


def test_a_limit_hides_lengths_from_the_scheduler():
    trace = list(make_trace(50, None, parse_lengths("4"), parse_lengths("uniform:1:30"), limit=20))
    assert {a.limit for a in trace} == {20}
    assert max(a.new_tokens for a in trace) == 20
    hidden = simulate(trace, COST, FULL, policy="static")
    known = simulate([a._replace(limit=a.new_tokens) for a in trace], COST, FULL, policy="static")
    assert known.rows_per_step > hidden.rows_per_step


def test_busy_is_no_load_but_occupancy_counts_rows():
    """One long request keeps a worker of eight rows busy all the time, with an eighth of its rows."""
    result = simulate(requests((0, 4, 50)), COST, FULL)
    assert (result.busy, result.occupancy) == (pytest.approx(1), pytest.approx(1 / 8))
    saturated = simulate(make_trace(800, None, parse_lengths("4"), parse_lengths("50")), COST, FULL)
    assert saturated.occupancy == pytest.approx(1)


def test_bad_settings_are_refused():
    with pytest.raises(UsageError, match="up to 8 rows"):
        simulate([], COST, PAPER, max_rows=9)
    with pytest.raises(UsageError, match="workers=0"):
        simulate([], COST, PAPER, workers=0)
    with pytest.raises(UsageError, match="policy='x'"):
        simulate([], COST, PAPER, policy="x")
    with pytest.raises(UsageError, match="request 1 of the trace"):
        simulate(requests((1, 1, 1), (0, 1, 1)), COST, PAPER)
    with pytest.raises(ScheduleError, match="for 4 layers"):
        simulate([], COST, Schedule.full(4))
    assert simulate([], COST, PAPER).finished == 0


# ---------------------------------------------------------------------- the command


@pytest.fixture
def cost_files(tmp_path):
    paths = [tmp_path / f"cost-{m.batch}.json" for m in MODELS]
    for path, model in zip(paths, MODELS, strict=True):
        path.write_text(json.dumps(model.to_dict()))
    paths[0].write_text(json.dumps({"cost": MODELS[0].to_dict()}))  # as skipdecode plan --json prints it
    return list(map(str, paths))


def test_command_compares_full_depth_with_the_schedule(cost_files, capsys):
    arguments = ["simulate", "--cost", *cost_files, "--nominal-speedup", "2", "--requests", "200", "--load", "0.8"]
    assert main([*arguments, "--flat", "--workers", "4", "--json"]) == 0
    full, flat = json.loads(capsys.readouterr().out)["runs"]
    assert full["name"] == "full"
    assert flat["name"] == "skipdecode-2x-flat"
    assert full["requests"] == flat["requests"] == 200
    assert flat["rate"] == full["rate"]
    assert flat["capacity"] > 1.3 * full["capacity"]
    assert full["layers_per_step"] == LAYERS
    assert flat["layers_per_step"] == 4
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "inter-token p99, ms" in text
    assert "x the requests/s that full depth can finish (nominal 2.00x)" in text


def test_prompts_cost_what_the_file_says(tmp_path, capsys):
    path = tmp_path / "cost.json"
    known = replace(MODELS[2], prompts=(PromptCost(64, 0.001),))
    path.write_text(json.dumps(known.to_dict()))
    arguments = ["simulate", "--cost", str(path), "--requests", "4", "--prompt-len", "64", "--limit", "1", "--json"]

    def seconds() -> float:
        """Of four prompts of 64 tokens in one forward."""
        assert main(arguments) == 0
        return json.loads(capsys.readouterr().out)["runs"][0]["prompt_seconds"]

    assert seconds() == pytest.approx(0.016 + LAYERS * 4 * 0.001)
    path.write_text(json.dumps(MODELS[2].to_dict()))
    assert seconds() == pytest.approx(0.016 + LAYERS * 4 * 64 * 0.0040 / 8)


def test_command_chooses_when_the_next_requests_join(tmp_path, capsys):
    config = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"model_type": "llama", "vocab_size": 99}))
    arguments = ["simulate", "--model", str(path), "--bandwidth", "10", "--flops", "100000", "--max-rows", "16"]
    arguments += ["--nominal-speedup", "3", "--requests", "300", "--prompt-len", "1", "--new-tokens", "uniform:32:96"]
    arguments += ["--policy", "refill", "--json"]
    seconds = {}
    for share in ("auto", "0", "0.125", "0.25", "0.5", "0.75", "1"):
        assert main([*arguments, "--refill-below", share]) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        seconds[share] = [r["seconds"] for r in runs]
        if share == "auto":
            full, falling = [r["refill_below"] for r in runs]
    # At full depth a free row is a row lost; under a falling schedule company of one's own age is worth waiting for.
    assert falling < full
    for column, found in enumerate(seconds["auto"]):
        assert found == min(s[column] for s in seconds.values())


def test_command_chooses_when_exact_requests_join(tmp_path, capsys):
    config = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"model_type": "llama", "vocab_size": 99}))
    arguments = [
        "simulate",
        "--model",
        str(path),
        "--bandwidth",
        "10",
        "--flops",
        "100000",
        "--max-rows",
        "4",
        "--json",
    ]
    arguments += ["--nominal-speedup", "3", "--requests", "80", "--prompt-len", "1", "--new-tokens", "uniform:8:48"]
    arguments += ["--policy", "refill", "--acceptance", "0.9"]
    seconds = {}
    for share in ("auto", "0", "0.125", "0.25", "0.5", "0.75", "1"):
        assert main([*arguments, "--refill-below", share]) == 0
        seconds[share] = json.loads(capsys.readouterr().out)["runs"][1]["seconds"]
    assert seconds["auto"] == min(seconds.values()) < max(seconds.values())


def test_command_predicts_from_a_config(tmp_path, capsys):
    config = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"model_type": "llama", "vocab_size": 99}))
    machine = ["--bandwidth", "3000", "--flops", "900000"]
    assert main(["simulate", "--model", str(path), *machine, "--requests", "20", "--json"]) == 0
    (full,) = json.loads(capsys.readouterr().out)["runs"]
    assert full["new_tokens"] == 20 * 64
    assert full["rate"] is None


def test_answers_of_one_token_have_no_steps_to_compare(cost_files, capsys):
    assert main(["simulate", "--cost", cost_files[2], "--nominal-speedup", "2", "--new-tokens", "1"]) == 0
    assert "(nominal 2.00x)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no cost was given"),
        (["--model", "x", "--flops", "1"], "--flops needs --bandwidth"),
        (["--cost", "COST", "--rate", "1", "--load", "1"], "give one of them"),
        (["--cost", "COST", "--load", "0"], "--load 0"),
        (["--cost", "COST", "--burst", "4"], "--burst needs"),
        (["--cost", "COST", "--refill-below", "auto"], "--refill-below needs --policy"),
        (["--cost", "COST", "--policy", "refill", "--refill-below", "2"], "refill_below=2.0 is not accepted"),
        (["--cost", "COST", "--policy", "refill", "--refill-below", "few"], "--refill-below few is not accepted"),
        (["--cost", "COST", "--max-rows", "99"], "known for 1 to 8 rows"),
        (["--cost", "COST", "--new-tokens", "many"], "is no length"),
    ],
)
def test_wrong_commands_get_one_line(arguments, message, cost_files, capsys):
    given = [cost_files[2] if a == "COST" else a for a in arguments]
    assert main(["simulate", *given]) == 2
    assert message in capsys.readouterr().err


def test_a_wrong_cost_file_is_named(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert main(["simulate", "--cost", str(path)]) == DataError.exit_code
    assert f"{path}: not a cost model" in capsys.readouterr().err


def test_simulating_imports_no_torch():
    code = "import sys, skipdecode.cli.simulate; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
