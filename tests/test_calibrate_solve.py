"""Calibration's pure part: the curve is the optimum, never rises and fits; the greedy search; what a schedule costs."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipdecode import Schedule
from skipdecode.calibration import curve as curve_module
from skipdecode.calibration.curve import LossTable, best_curve, best_flat, bucket_starts
from skipdecode.calibration.goal import Goal, TextCost, deepest_flat, layers_only, paper_within, set_goal
from skipdecode.calibration.order import greedy_order, greedy_trials
from skipdecode.calibration.settings import CalibrationSettings
from skipdecode.errors import DataError, TargetError, UsageError
from skipdecode.performance.cost import CostModel

LAYERS = 12
COST = CostModel.of_step(LAYERS, batch=4, fixed_seconds=2.0, layer_seconds=1.0, kv_seconds=0.0025)

# ---------------------------------------------------------------------- the curve

values = st.floats(0, 10, allow_nan=False)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[dict[int, float]], float]:
    buckets, depths = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    losses = [{b + 2: draw(values) for b in range(depths)} for _ in range(buckets)]
    costs = [{b + 2: draw(st.floats(0.1, 3)) * (b + 2) for b in range(depths)} for _ in range(buckets)]
    least, most = sum(min(c.values()) for c in costs), sum(max(c.values()) for c in costs)
    return losses, costs, draw(st.floats(0.8 * least, 1.1 * most))


def total(table: list[dict[int, float]], curve: tuple[int, ...]) -> float:
    return sum(entry[b] for entry, b in zip(table, curve, strict=True))


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_curve_is_the_best_of_all_that_never_rise_and_fit(problem):
    losses, costs, limit = problem
    found = best_curve(losses, costs, limit)
    falling = (c for c in itertools.product(losses[0], repeat=len(losses)) if all(a >= b for a, b in pairwise(c)))
    fitting = [c for c in falling if total(costs, c) <= limit * (1 + 1e-12)]
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert all(a >= b for a, b in pairwise(found))
    assert total(costs, found) <= limit * (1 + 1e-9)
    assert total(losses, found) == pytest.approx(min(total(losses, c) for c in fitting), abs=1e-9)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_with_few_points_kept_it_still_fits_and_is_no_worse_than_flat(problem):
    losses, costs, limit = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curve_module, "MOST_POINTS", 3)
        found = best_curve(losses, costs, limit)
    flat = best_flat(losses, costs, limit)
    if flat is None:
        return
    assert found is not None
    assert all(a >= b for a, b in pairwise(found))
    assert total(costs, found) <= limit * (1 + 1e-9)
    assert total(losses, found) <= total(losses, (flat,) * len(losses)) + 1e-9


def test_a_curve_of_real_size_is_solved_in_seconds():
    losses = [{b: (1 + k) / b + math.sin(7 * b * (k + 1)) / 50 for b in range(2, 33)} for k in range(16)]
    costs = [{b: (b + 0.37 * k / 16) * (1 - k / 40) for b in range(2, 33)} for k in range(16)]
    found = best_curve(losses, costs, 130.0)
    assert found is not None
    assert total(costs, found) <= 130.0 + 1e-9
    flat = best_flat(losses, costs, 130.0)
    assert flat is not None
    assert total(losses, found) < total(losses, (flat,) * 16)


# ---------------------------------------------------------------------- the order


def test_greedy_finds_the_best_nested_order_when_losses_are_interactions():
    # 3 and 4 do the same work: each alone is useless, both are not.
    def loss(gone: tuple[int, ...]) -> float:
        return sum({1: 0.5, 2: 0.2, 3: 0.01, 4: 0.0, 5: 0.9}[x] for x in gone) + (3 in gone and 4 in gone)

    rounds = greedy_order(lambda sets: [loss(s) for s in sets], range(1, 6), 4, 5, dict.fromkeys(range(6), 0.0))
    assert [r.dropped for r in rounds] == [4, 2, 1, 5]
    assert [r.base for r in rounds] == pytest.approx([0.0, 0.0, 0.2, 0.7])


def test_few_candidates_measure_less_and_a_layer_that_turned_bad_makes_room():
    measured: list[tuple[int, ...]] = []

    def measure(sets):
        measured.extend(sets)
        return [len(s) + 5.0 * (3 in s and 4 in s) + s[-1] * 0.1 if s else 0.0 for s in sets]

    rounds = greedy_order(measure, range(3, 9), 4, 2, dict.fromkeys(range(9), 0.0))
    assert [r.dropped for r in rounds] == [3, 5, 6, 7]
    assert len(rounds[0].losses) == 6
    assert all(len(r.losses) == 2 for r in rounds[1:])
    assert len(measured) == greedy_trials(6, 4, 2) == 13


def test_equals_are_decided_by_the_cheaper_ranking():
    rounds = greedy_order(lambda sets: [1.0] * len(sets), range(1, 4), 3, 1, {1: 0.3, 2: 0.1, 3: 0.2})
    assert [r.dropped for r in rounds] == [2, 3, 1]


# ---------------------------------------------------------------------- tables and costs


def test_the_table_predicts_flat_curves_exactly_and_others_by_position():
    table = LossTable((2, 2, 1), {4: (1.0, 2.0, 3.0), 2: (1.0, 4.0, 5.0)})
    assert table.predict((4,)) == table.mean(4) == 6.0 / 5
    assert table.predict((4, 2)) == 8.0 / 5
    assert table.by_bucket((0, 1)) == [{4: 2.0, 2: 4.0}, {4: 3.0, 2: 5.0}]
    # Where the last prompt token runs more layers under a larger budget, so does what predicts the first token.
    by_budget = LossTable((2, 2, 1), {4: (1.0, 2.0, 3.0), 2: (1.5, 4.0, 5.0)})
    assert by_budget.by_bucket((0, 1)) == [{4: 2.0, 2: 4.5}, {4: 3.0, 2: 5.0}]
    with pytest.raises(ValueError, match="no loss was measured at 3 layers"):
        table.predict((3,))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40).map(lambda c: sorted(c, reverse=True)), st.integers(1, 12))
def test_buckets_start_at_zero_and_rise(counts, buckets):
    starts = bucket_starts(counts, buckets)
    assert starts[0] == 0
    assert len(starts) == min(len(counts), buckets) or len(starts) < buckets
    assert all(a < b < len(counts) for a, b in pairwise(starts))


def test_texts_that_ended_cost_nothing_and_a_batch_waits_for_its_longest():
    alone = TextCost.of_lengths(CostModel.of_step(LAYERS, 1, 0.0, 1.0), 0, [2, 2, 4, 4])
    assert alone.steps == (1.0, 0.5, 0.5)
    schedule = Schedule(LAYERS, tuple(range(1, 11)), (12, 6, 3))
    assert alone.seconds(schedule) == 12 + 3 + 1.5
    together = TextCost.of_lengths(CostModel.of_step(LAYERS, 2, 0.0, 1.0), 0, [2, 2, 4, 4])
    assert together.steps == (1.0, 0.75, 0.75)
    assert TextCost.of_lengths(COST, 0, [2, 2, 4, 4], "continuous").steps == alone.steps
    with pytest.raises(DataError, match="two tokens"):
        TextCost.of_lengths(COST, 0, [1, 1])


def test_texts_of_one_length_cost_what_the_cost_model_says():
    schedule = Schedule.from_speedup(LAYERS, 2, 20)
    workload = TextCost.of_lengths(COST, 30, [21] * 5)
    assert workload.seconds(schedule) == pytest.approx(COST.sequence_seconds(schedule, 30, 21))
    assert workload.speedup(schedule) == pytest.approx(COST.speedup(schedule, 30, 21))


def test_whole_requests_of_one_length_cost_what_the_cost_model_says():
    schedule = Schedule.from_speedup(LAYERS, 2, 20).with_prompt((0, 1, 2))
    workload = TextCost.of_lengths(COST, 30, [21] * 5, whole=True)
    assert workload.seconds(schedule) == pytest.approx(COST.request_seconds(schedule, 30, 21))
    assert workload.speedup(schedule) == pytest.approx(COST.request_speedup(schedule, 30, 21))


def test_a_request_s_goal_has_the_prompt_sets_with_which_it_is_in_reach():
    def goal(target: float, **options) -> Goal:
        return set_goal(CalibrationSettings(target_speedup=target, **options), COST, 60, [20] * 4, LAYERS)

    def depths(found: Goal) -> list[set[int]]:
        return [{LAYERS if prompt == "full" else len(prompt) for prompt in sets} for sets in found.prompts]

    assert depths(goal(1.0)) == [{12}, {8}, {6}, {4}]
    steep = goal(2.6)
    assert depths(steep) == [{4}]
    assert steep.workload.speedup(steep.paper) >= 2.6
    assert len(steep.paper.prompt_layers()) == 4
    assert depths(goal(1.5, prompt_depths=("0-3", "5"))) == [{4}, {5}]
    assert depths(goal(2.0, phase="decode")) == [{12}]
    with pytest.raises(TargetError, match="whole request"):
        goal(5.0)


@given(st.floats(1, 3), st.lists(st.integers(2, 30), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_baselines_reach_the_target_and_waste_little(target, lengths):
    workload = TextCost.of_lengths(COST, 10, lengths)
    limit = workload.full_seconds / target
    flat = deepest_flat(workload, limit, 1)
    assert flat is not None
    assert workload.speedup(Schedule.constant(LAYERS, flat)) >= target - 1e-9
    paper = paper_within(workload, limit, 20, 1)
    assert workload.speedup(paper) >= target - 1e-9
    # Rounding to whole layers leaves less than two layers at each position.
    assert (
        workload.seconds(paper) >= limit - 2 * sum(s * COST.step_seconds(1, 40) for s in workload.steps)
        or paper.is_full
    )


def test_goals(tmp_path):
    goal = set_goal(CalibrationSettings(target_speedup=2.0), COST, 10, [20] * 4, LAYERS)
    assert goal.workload.speedup(goal.paper) >= 2
    assert goal.workload.speedup(goal.even) >= 2
    decode = set_goal(CalibrationSettings(target_speedup=2.0, phase="decode"), COST, 10, [20] * 4, LAYERS)
    assert decode.workload.seconds(decode.even) == decode.workload.seconds(decode.paper)
    nominal = set_goal(CalibrationSettings(nominal_speedup=2.0), None, 10, [20] * 4, LAYERS)
    assert nominal.paper.budgets == Schedule.from_speedup(LAYERS, 2, 20).budgets
    for phase in ("decode", "request"):
        streamed = CalibrationSettings(target_speedup=2.0, use="continuous", phase=phase)
        flat = set_goal(streamed, COST, 10, [20] * 4, LAYERS)
        assert flat.paper.is_flat
        assert flat.least == min(most for sets in flat.prompts for most in sets.values())
        assert flat.least == flat.paper.budgets[0] or phase == "request"
    with pytest.raises(TargetError, match=r"out of reach.*2 of 12 layers.*the bound is 3\.\d+x at batch 4"):
        set_goal(CalibrationSettings(target_speedup=9.0), COST, 10, [20] * 4, LAYERS)
    with pytest.raises(TargetError, match=r"with 8 of 12 layers, the fewest that --least"):
        set_goal(CalibrationSettings(target_speedup=2.0, least=8), COST, 10, [20] * 4, LAYERS)
    with pytest.raises(UsageError, match="--least 1 is not accepted for 12 layers: give 2 to 12"):
        set_goal(CalibrationSettings(target_speedup=2.0, least=1), COST, 10, [20] * 4, LAYERS)
    assert layers_only(LAYERS).speedup(Schedule.constant(LAYERS, 4), 0, 9) == 3
