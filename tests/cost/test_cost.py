"""The cost model against known bounds, real parameter counts, real caches and a simulated stream; solved budgets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from counted import CACHED, FIXED, LAYER, STORED, TOKEN, count_time
from every import suited
from products import in_turn
from skipdecode import Schedule, attach
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.measure import fitted, measure_cost
from skipdecode.cost.model import CostModel, PromptCost, StepCost
from skipdecode.cost.solve import solve
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.opening import Backend
from skipdecode.errors import DataError, ScheduleError, TargetError, UsageError
from skipdecode.models.families import decoder_layers
from tiny import LATER, LAYERS, OPTIONS, SCHEDULES, shared_model, tiny_model

SMOLLM2 = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
    tie_word_embeddings=True,
)


def smollm2(batch: int = 8) -> CostModel:
    """A step that reads all weights at 30 GB/s, and computes in no time."""
    read = 2 * 3_540_096 / 30e9
    step = StepCost(batch, 2 * 49_152 * 576 / 30e9, read, 2 * 3 * 64 * 2 / 30e9)
    return CostModel(30, batch, (step,), (PromptCost(1e9, read, read * 0.0625),))


# ---------------------------------------------------------------------- sizes


# Large enough that norms outside the layers do not matter beside the head.
_LARGER = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "ffn_dim": 704,
    "n_embd": 256,
    "word_embed_proj_dim": 256,
    "head_dim": 64,
    "moe_intermediate_size": 192,
    "shared_expert_intermediate_size": 320,
    "rotary_dim": 32,
}


@pytest.mark.parametrize("family", OPTIONS)
def test_sizes_are_those_of_the_real_model(family):
    config = AutoConfig.for_model(family, **{k: _LARGER.get(k, v) for k, v in OPTIONS[family].items()})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = decoder_layers(model)
    sizes = [(name, p.numel()) for name, p in layers.named_parameters()]
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    chosen = getattr(config, "num_experts_per_tok", 1) / count  # of equally large experts
    read = sum(size * (chosen if ".experts." in name else 1) for name, size in sizes)
    geometry = ModelGeometry.from_config(config, dtype_bytes=1)
    assert geometry.layer_params == pytest.approx(read / len(layers))
    assert geometry.weight_bytes() == model.num_parameters()


_KEYS = ["llama", "mistral", "gemma3_text", "gpt_bigcode", "opt"]
_STATES = [each for each in ("lfm2", "qwen3_5_text", "jamba", "mamba2", "falcon_h1", "gemma4_text") if each in LATER]


@pytest.mark.parametrize(("family", "name", "prompt"), in_turn([*_KEYS, *_STATES], SCHEDULES, ["full", "max_exit"]))
def test_kv_bytes_are_those_of_a_real_cache(family, name, prompt):
    model = shared_model(family)
    if (plan := suited(family, replace(SCHEDULES[name], prompt=prompt))) is None:
        return
    ids = torch.randint(3, 100, (3, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    with attach(model, plan):
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    geometry = ModelGeometry.from_config(model.config, 4)
    assert geometry.kv_bytes_held(plan, 7, 6, batch=3) == out.past_key_values.kv_bytes()


# ---------------------------------------------------------------------- seconds


def test_a_step_is_its_parts():
    cost = CostModel.of_step(10, batch=2, fixed_seconds=5.0, layer_seconds=1.0, kv_seconds=0.005)
    assert cost.step_seconds(4, 100) == pytest.approx(5 + 4 * (1 + 1))
    schedule = Schedule.paper(10, min_exit_layer=4, max_exit_layer=6, seq_len=3)
    # Three steps, of 6, 5 and 4 layers, after 20 prompt tokens; a token reads itself too.
    expected = 15 + (6 + 5 + 4) + 0.01 * (6 * 21 + 5 * 22 + 4 * 23)
    assert cost.text(20, 4).seconds(schedule) == pytest.approx(expected)


def test_sliding_window_layers_stop_reading_at_the_window():
    cost = CostModel(4, 1, (StepCost(1, 0.0, 1.0, 1.0),), window=10, window_share=0.5)
    assert cost.step_seconds(4, 10) == pytest.approx(4 * 11)
    assert cost.step_seconds(4, 30) == pytest.approx(4 * (1 + 20))


costs = st.builds(
    CostModel.of_step,
    num_layers=st.integers(2, 24),
    batch=st.integers(1, 64),
    fixed_seconds=st.floats(0, 10),
    layer_seconds=st.floats(0.01, 10),
    kv_seconds=st.floats(0, 0.0001),
)


@st.composite
def costs_and_schedules(draw):
    cost = draw(costs)
    budgets = sorted(draw(st.lists(st.integers(2, cost.num_layers), min_size=1, max_size=12)), reverse=True)
    return cost, Schedule(cost.num_layers, tuple(range(1, cost.num_layers - 1)), tuple(budgets))


@given(costs_and_schedules(), st.integers(0, 50), st.integers(2, 30))
def test_speedups_are_ordered(both, prompt_len, new_tokens):
    cost, schedule = both
    slack = 1 + 1e-9
    least = Schedule.constant(cost.num_layers, 2)
    speedup, bound = (cost.text(prompt_len, new_tokens).speedup(each) for each in (schedule, least))
    assert 1 <= speedup * slack <= bound * slack**2
    unread = replace(cost, steps=(cost.step._replace(kv_seconds=0.0),))
    nominal = cost.num_layers / schedule.mean_budget(new_tokens - 1)
    assert unread.text(prompt_len, new_tokens).speedup(schedule) <= nominal * slack
    deeper = Schedule.constant(cost.num_layers, schedule.budgets[0])
    assert cost.text(prompt_len, new_tokens).seconds(schedule) <= slack * cost.text(prompt_len, new_tokens).seconds(
        deeper
    )


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "[]",
        "{}",
        '{"format": 2, "num_layers": 4, "batch": 1, "steps": [{"rows": 1, "fixed_seconds": 1, "layer_seconds": 1}]}',
        '{"format": 3, "num_layers": 4}',
        '{"format": 3, "y": 2}',
        '{"format": 3, "num_layers": 4, "batch": 1, "steps": []}',
        '{"format": 3, "num_layers": 4, "batch": 0, "steps": [{"rows": 1, "fixed_seconds": 1, "layer_seconds": 1}]}',
        '{"format": 3, "num_layers": 4, "batch": 1, "steps": [{"rows": "x", "fixed_seconds": 1, "layer_seconds": 1}]}',
    ],
)
def test_what_is_no_cost_model_is_refused(text):
    with pytest.raises(DataError, match="cost model"):
        CostModel.from_dict(json.loads(text))


# ---------------------------------------------------------------------- rows and prompts


def test_costs_between_measured_batches():
    steps = StepCost(1, 0.01, 0.002), StepCost(4, 0.012, 0.0026), StepCost(8, 0.016, 0.004)
    cost = CostModel(8, 8, steps)
    assert cost.max_rows == 8
    assert cost.at(1).layer_seconds == 0.002
    assert cost.at(2).layer_seconds == pytest.approx(0.0022)
    assert cost.at(6).layer_seconds == pytest.approx(0.0033)
    assert replace(cost, batch=6).step_seconds(8) == pytest.approx(0.014 + 8 * 0.0033)
    assert CostModel(8, 8, steps[2:]).at(1) == (1, 0.016, 0.004, 0.0), "weights are read for one row as well"
    with pytest.raises(UsageError, match="known for 1 to 8 rows"):
        replace(cost, batch=9)
    with pytest.raises(UsageError, match="known for 1 to 8 rows"):
        cost.at(9)
    with pytest.raises(UsageError, match="rising from 1"):
        CostModel(8, 1, (steps[0], steps[0]))


def test_prompts_lie_on_lines_between_what_is_known():
    prompts = (PromptCost(16, 0.2, 0.01), PromptCost(64, 0.8, 0.05))
    cost = replace(CostModel.of_step(6, 1, 0.1, 0.2), prompts=prompts)
    layers, projections = zip(*(cost.prompt_layer_seconds(tokens) for tokens in (1, 16, 40, 64, 128)), strict=True)
    assert layers == pytest.approx((0.2, 0.2, 0.5, 0.8, 1.6))
    assert projections == pytest.approx((0.01, 0.01, 0.03, 0.05, 0.1))


def test_prompts_of_unknown_cost_are_rows_of_the_largest_step():
    cost = CostModel(6, 8, (StepCost(1, 0.1, 0.2), StepCost(8, 0.3, 0.4)))
    assert cost.prompt_layer_seconds(3) == pytest.approx((0.2, 0.2))
    assert cost.prompt_layer_seconds(100) == pytest.approx((5.0, 5.0))


def test_prompts_cost_forwards_of_the_engine_by_hand():
    cost = CostModel(10, 8, (StepCost(1, 1, 0.1), StepCost(8, 8, 0.8)), (PromptCost(512, 512, 51.2),))
    # Eight prompts of 100 tokens: 512 tokens with the ends of five rows, 288 with those of three.
    assert cost.prompts_seconds(Schedule.full(10), 100) == pytest.approx(5 + 10 * 512 + 3 + 10 * 512)
    split = Schedule.split(10, 4, [6, 4])
    # Position 0 runs layers 0 and 5 to 9: five are projected, and run on the last tokens.
    expected = 5 + 4 * 512 + 5 * (51.2 + 0.5) + 3 + 4 * 512 + 5 * (51.2 + 0.3)
    assert cost.prompts_seconds(split, 100) == pytest.approx(expected)
    long = replace(cost, batch=1)
    # One prompt of 600: its first forward gives no token.
    assert long.prompts_seconds(split, 600) == pytest.approx(2 * (1 + 4 * 512 + 5 * 51.2) + 5 * 0.1)
    together, request = (
        long.prompts_seconds(split, 600) + long.text(600, 3).seconds(split),
        long.text(600, 3, whole=True),
    )
    assert request.seconds(split) == pytest.approx(together)
    assert request.speedup(split) == pytest.approx(request.seconds(Schedule.full(10)) / together)


def test_a_fit_costs_a_bridge_over_each_skipped_layer_and_a_projection_more_for_each_tap():
    bare = CostModel(10, 1, (StepCost(1, 5.0, 2.0, 0.0),), (PromptCost(8, 4.0, 0.5),))
    cost = replace(bare, bridge_share=0.25, taps=1)
    flat = Schedule.constant(10, 6, warmup_layers=1)
    split = replace(flat, prompt=(0, 1, 2))
    assert cost.text(8, 4).seconds(flat) == pytest.approx(bare.text(8, 4).seconds(flat) + 3 * 4 * 0.25 * 2)
    assert cost.step_seconds(6) == pytest.approx(bare.step_seconds(6) + 4 * 0.25 * 2)
    assert cost.prompt_seconds(flat, 8) == bare.prompt_seconds(flat, 8)  # at full depth
    last, projected = len(split.last_prompt_layers()), len(split.projected)
    more = (10 - last) * 0.25 * 2 + projected * 0.5
    assert cost.prompt_seconds(split, 8) == pytest.approx(bare.prompt_seconds(split, 8) + more)
    shallow = replace(flat, prompt="max_exit")
    assert cost.prompt_seconds(shallow, 8) == pytest.approx(bare.prompt_seconds(shallow, 8) + 4 * 0.25 * 4)
    assert cost.text(8, 4).speedup(flat) < bare.text(8, 4).speedup(flat)
    assert CostModel.from_dict(cost.to_dict()) == cost
    sizes = ModelGeometry.from_config(SMOLLM2)
    assert bare.with_fit(sizes, 128).bridge_share == pytest.approx(0.0416, abs=1e-3)


def test_wrong_numbers_are_refused():
    cost = smollm2()
    with pytest.raises(ScheduleError, match="24 layers"):
        cost.text(10, 5).speedup(Schedule.full(24))
    with pytest.raises(UsageError, match="fixed_seconds"):
        CostModel.of_step(4, 1, float("nan"), 1.0)


# ---------------------------------------------------------------------- budgets


def test_the_decay_is_the_papers():
    schedule = solve(smollm2(), 2.0, 64, prompt="full", prompt_len=1)
    mean = schedule.mean_budget()
    assert schedule.budgets[0] == pytest.approx(mean * 4 / 3, abs=1)
    assert schedule.budgets[-1] == pytest.approx(mean * 2 / 3, abs=1)


@given(costs, st.floats(0, 1), st.integers(1, 20), st.booleans())
def test_solved_budgets_reach_the_target_with_the_most_layers(cost, share, seq_len, flat):
    bound = cost.text(8, seq_len + 1, whole=True).speedup(Schedule.constant(cost.num_layers, 2))
    target = 1 + share * (bound - 1) * 0.999
    schedule = solve(cost, target, seq_len, prompt="full", flat=flat, prompt_len=8)
    assert cost.text(8, seq_len + 1, whole=True).speedup(schedule) >= target
    more = tuple(min(cost.num_layers, b + 1) for b in schedule.budgets)
    if more != schedule.budgets:
        deeper = Schedule(cost.num_layers, schedule.drop_order, more)
        assert cost.text(8, seq_len + 1, whole=True).speedup(deeper) < target


prompt_costs = st.tuples(st.floats(1, 600), st.floats(0.01, 100), st.floats(0, 1)).map(
    lambda parts: PromptCost(parts[0], parts[1], parts[1] * parts[2])
)


@given(costs, prompt_costs, st.floats(0, 1), st.integers(1, 200), st.sampled_from(["auto", "full", "max_exit"]))
def test_targets_of_the_whole_request_are_reached(cost, prompts, share, prompt_len, prompt):
    cost = replace(cost, prompts=(prompts,))
    shortest = Schedule.constant(cost.num_layers, 2, prompt=(0, 1) if prompt == "auto" else prompt)
    bound = min(
        cost.text(prompt_len, 17, whole=True).speedup(each) for each in (shortest, replace(shortest, prompt="full"))
    )
    target = 1 + share * (bound - 1) * 0.999
    schedule = solve(cost, max(1.0, target), 16, prompt_len=prompt_len, prompt=prompt)
    assert cost.text(prompt_len, 17, whole=True).speedup(schedule) >= target
    assert schedule.is_full or target > 1


def test_prompts_stay_full_where_giving_up_their_layers_saves_nothing():
    cost = smollm2(batch=1)  # reads alone: the last token reads what the prompt's others leave out
    for target in (1.3, 2.0, 3.0):
        assert solve(cost, target, 64, prompt_len=32).prompt == "full"


def test_a_target_out_of_reach_says_the_bound_and_why():
    cost = smollm2(batch=1)
    with pytest.raises(TargetError) as error:
        solve(cost, 5, 64, prompt="full")
    text = str(error.value)
    least = Schedule.constant(30, 2)
    bound = cost.text(64, 65, whole=True).speedup(least)
    share = 64 * cost.step.fixed_seconds / cost.text(64, 65, whole=True).seconds(least)
    assert f"the bound of the whole request is {int(bound * 100) / 100:.2f}x" in text
    assert f"outside the layers {share:.0%}" in text
    assert "with 2 of 30 layers" in text
    assert solve(cost, bound * 0.9999, 64, prompt="full").budgets[-1] == 2
    with pytest.raises(TargetError):
        solve(cost, bound * 1.0001, 64, prompt="full")


def test_an_order_that_keeps_layers_limits_the_budget():
    cost = smollm2()
    order = (10, 11, 12, 13)
    schedule = solve(cost, 1.05, 16, prompt="full", prompt_len=1, drop_order=order)
    assert schedule.drop_order == order
    with pytest.raises(TargetError, match="with 26 of 30 layers, the fewest, and 30 for prompts, the bound"):
        solve(cost, 2, 16, prompt="full", prompt_len=1, drop_order=order)


# ---------------------------------------------------------------------- measuring


TWELVE = ModelGeometry.from_config(LlamaConfig.from_dict(SMOLLM2.to_dict() | {"num_hidden_layers": 12}))


def test_a_fit_finds_the_parts_it_was_made_from():
    truth = CostModel(
        12, 4, (StepCost(1, 0.01, 0.002, 4e-7), StepCost(4, 0.02, 0.003, 2e-7)), (PromptCost(64, 0.5, 0.03),)
    )
    steps = {
        (rows, depth, tokens): replace(truth, batch=rows).step_seconds(depth, tokens)
        for rows in (1, 4)
        for depth, tokens in ((12, 70), (6, 70), (2, 70), (12, 500))
    }
    by_run = {12: Schedule.full(12), 6: Schedule.split(12, 6, 12)}
    prompts = {run: truth.prompt_seconds(schedule, 64, 2) for run, schedule in by_run.items()}
    fit = fitted(TWELVE, steps, {(2, 32, run): seconds for run, seconds in prompts.items()})
    for fitted_part, true in zip((*fit.steps, *fit.prompts), (*truth.steps, *truth.prompts), strict=True):
        assert fitted_part == pytest.approx(true)
    assert fit.residual == pytest.approx(0, abs=1e-9)
    assert (fit.source, fit.batch) == ("measured", 4)
    noisy = fitted(TWELVE, steps | {(4, 6, 70): steps[4, 6, 70] * 1.1}, {})
    assert 0.01 < noisy.residual < 0.1


def test_a_fit_of_nonsense_is_refused():
    with pytest.raises(UsageError, match="no less time"):
        fitted(TWELVE, {(1, 12, 10): 1.0, (1, 6, 10): 1.5, (1, 2, 10): 2.0}, {})
    with pytest.raises(UsageError, match="two depths"):
        fitted(TWELVE, {(1, 12, 10): 1.0}, {})
    for seconds in (0.1, 0.3, 0.7, 1.1):  # a cache read that takes all of a layer, up to rounding
        all_reads = fitted(TWELVE, {(1, 12, 70): seconds, (1, 6, 70): seconds / 2, (1, 12, 500): 99.0}, {})
        assert all_reads.step_seconds(12, 70) == pytest.approx(seconds)
    through_zero = fitted(TWELVE, {(1, 12, 10): 1.0, (1, 6, 10): 0.4}, {})
    assert through_zero.step.fixed_seconds == 0


def test_the_fast_engine_is_measured_by_rows_layers_and_cached_tokens(monkeypatch):
    count_time(monkeypatch)
    model = tiny_model("llama")
    cost = measure_cost(Backend(model, open_model(model)), batch=5, prompt_len=8)
    assert (cost.num_layers, cost.batch, cost.source) == (LAYERS, 5, "measured")
    for step, rows in zip(cost.steps, (1, 5), strict=True):
        assert step == pytest.approx((rows, FIXED, LAYER + rows * TOKEN, CACHED))
    half = Schedule.split(LAYERS, LAYERS // 2, LAYERS)
    for tokens, ends in ((8, 1), (40, 5)):
        # In the top layer, as in the layers above those that prompts run, tokens before the last only store.
        run, above = LAYER + tokens * TOKEN, LAYER + ends * TOKEN + (tokens - ends) * STORED
        full, lower = FIXED + (LAYERS - 1) * run + above, FIXED + LAYERS // 2 * (run + above)
        assert cost.prompt_seconds(Schedule.full(LAYERS), tokens, ends) == pytest.approx(full)
        assert cost.prompt_seconds(half, tokens, ends) == pytest.approx(lower)


def test_the_prompts_and_rows_of_a_calibration_are_those_of_its_batch(monkeypatch):
    count_time(monkeypatch)
    model = tiny_model("llama")
    before = dict(model.__dict__)
    cost = measure_cost(Backend(model), batch=2, prompt_len=8)
    assert (cost.num_layers, cost.batch, cost.source) == (LAYERS, 2, "measured")
    assert cost.step == pytest.approx((2, 0.0, 1.0, 0.0), abs=1e-9), "transformers' layers, a second each"
    assert [prompt.tokens for prompt in cost.prompts] == [8, 16]
    assert [step.rows for step in cost.steps] == [1, 2], "a prompt's end is a step of one row"
    assert model.__dict__.keys() == before.keys(), "the model is as it was"


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_bigcode", "bloom", "qwen3_moe"])
def test_calibration_of_other_families(family, monkeypatch):
    count_time(monkeypatch)
    cost = measure_cost(Backend(tiny_model(family)), batch=2, prompt_len=12)
    assert cost.step_seconds(3, 12) == pytest.approx(3.0)


def test_other_work_on_the_machine_in_most_rounds_changes_no_cost(monkeypatch):
    """Each kind of work is quiet in one round of three, and takes 1.5 to 4 times as long in the others."""
    runs: dict[tuple[object, ...], int] = {}

    def taken(seconds: float, *kind: object) -> float:
        run = runs[kind] = runs.get(kind, -1) + 1
        number = list(runs).index(kind)
        return seconds if (run + number) % 3 == 0 else seconds * (1.5 + number % 6 / 2)

    def steps(backend, schedule, shape):
        seconds = taken(0.02 + 0.01 * schedule.budgets[0], schedule.budgets, shape)
        return [seconds] * (shape.new - 1)

    def prompt(backend, schedule, batch, tokens):
        return taken(0.02 + 0.05 * len(schedule.prompt_layers()), schedule.prompt_layers(), batch, tokens)

    monkeypatch.setattr("skipdecode.cost.measure.step_seconds", steps)
    monkeypatch.setattr("skipdecode.cost.measure.prompt_seconds", prompt)
    cost = measure_cost(Backend(tiny_model("llama")), batch=2, prompt_len=8)
    for rows, step in zip((1, 2), cost.steps, strict=True):
        assert step.layer_seconds == pytest.approx(0.01, rel=0.01), f"{rows} rows"
        assert step.fixed_seconds == pytest.approx(0.02, rel=0.01)
    assert cost.prompts[-1].layer_seconds == pytest.approx(0.05, rel=0.01)


def test_calibration_refuses_what_does_not_fit():
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="context is 256"):
        measure_cost(Backend(model), prompt_len=300)
    with pytest.raises(UsageError, match="one layer"):
        measure_cost(Backend(tiny_model("llama", num_hidden_layers=1)))
