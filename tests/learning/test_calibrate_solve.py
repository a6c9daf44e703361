"""Calibration's pure part: what a schedule costs, and the depth that a target leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipdecode import Schedule
from skipdecode.cost.model import CostModel, PromptCost, TextCost
from skipdecode.errors import DataError, TargetError
from skipdecode.learning.goal import Goal, set_goal
from skipdecode.learning.settings import CalibrationSettings

LAYERS = 12
COST = CostModel.of_step(LAYERS, batch=4, fixed_seconds=2.0, layer_seconds=1.0, kv_seconds=0.0025)

# ---------------------------------------------------------------------- costs


def test_texts_that_ended_cost_nothing_and_a_batch_waits_for_its_longest():
    alone = TextCost.of_lengths(CostModel.of_step(LAYERS, 1, 0.0, 1.0), 0, [2, 2, 4, 4])
    assert alone.steps == (1.0, 0.5, 0.5)
    schedule = Schedule(LAYERS, tuple(range(1, 11)), (12, 6, 3))
    assert alone.seconds(schedule) == 12 + 3 + 1.5
    together = TextCost.of_lengths(CostModel.of_step(LAYERS, 2, 0.0, 1.0), 0, [2, 2, 4, 4])
    assert together.steps == (1.0, 0.75, 0.75)
    with pytest.raises(DataError, match="two tokens"):
        TextCost.of_lengths(COST, 0, [1, 1])


def test_a_request_s_goal_has_the_prompt_sets_with_which_it_is_in_reach():
    def goal(target: float, **options) -> Goal:
        return set_goal(CalibrationSettings(target_speedup=target, **options), COST, 60, [20] * 4, LAYERS)

    def depths(goal_of_target: Goal) -> list[str | int]:
        return [prompt if isinstance(prompt, str) else len(prompt) for prompt in goal_of_target.prompts]

    assert depths(goal(1.0)) == ["full", "max_exit"]  # prompts would run fewer layers for nothing
    steep = goal(2.6)
    assert depths(steep) == ["max_exit", 3, 4]
    assert steep.workload.speedup(steep.paper) >= 2.6
    assert len(steep.paper.prompt_layers()) == 4
    assert depths(goal(1.5, prompt_depths=("0-3", "5"))) == [5, 4]


def test_goals():
    nominal = set_goal(CalibrationSettings(nominal_speedup=2.0), None, 10, [20] * 4, LAYERS)
    assert nominal.paper.budgets == Schedule.from_speedup(LAYERS, 2, 20).budgets
    flat = set_goal(CalibrationSettings(target_speedup=2.0, flat=True), COST, 10, [20] * 4, LAYERS)
    assert flat.paper.is_flat
    assert flat.least <= flat.paper.budgets[0]
    with pytest.raises(TargetError, match=r"at batch 4.*2 of 12 layers.*the bound of the whole request is 4\.10x"):
        set_goal(CalibrationSettings(target_speedup=9.0), COST, 10, [20] * 4, LAYERS)
    assert nominal.workload.speedup(Schedule.constant(LAYERS, 4)) == 3, "layers alone count"


@pytest.mark.parametrize("flat", [False, True])
def test_schedules_in_the_learned_order_reach_the_target_and_keep_the_least_layers(flat):
    goal = set_goal(CalibrationSettings(target_speedup=1.8, flat=flat), COST, 60, [20] * 4, LAYERS)
    order = (6, 3, 9, 4, 10, 2, 8, 1, 5, 7)[: LAYERS - goal.least]
    schedules = [goal.schedule(order, prompt) for prompt in goal.prompts]
    assert schedules
    for schedule in schedules:
        assert goal.workload.speedup(schedule) >= 1.8 - 1e-9
        assert schedule.drop_order == order
        assert min(schedule.budgets) >= LAYERS - len(order)
    assert all(s.is_flat for s in schedules) == flat
    assert set(replace(goal, limit=1.0).schedule(order, "full").budgets) == {goal.least}


def test_where_prompts_take_the_time_new_tokens_keep_all_layers() -> None:
    prompts = PromptCost(1, 1.0, 0.1), PromptCost(1000, 1000.0, 100.0)
    cost = replace(CostModel.of_step(LAYERS, 1, 0.0, 1.0), prompts=prompts)
    goal = set_goal(CalibrationSettings(target_speedup=1.25), cost, 600, [8] * 4, LAYERS)
    sets = [prompt for prompt in goal.prompts if prompt != "max_exit"]
    assert [len(prompt) for prompt in sets] == [9]
    assert set(goal.schedule(goal.depths.order, sets[0]).budgets) == {LAYERS}
