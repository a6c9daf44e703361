"""Which schedule a step runs under, and what a run may be told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipdecode import Schedule
from skipdecode.errors import ScheduleError
from skipdecode.learning.settings import TuneConfig

TARGET = Schedule.from_speedup(12, 3, 20)


def test_what_is_named_twice_is_drawn_twice_as_often_and_prompts_are_sampled_too() -> None:
    config = TuneConfig(sampled_speedups=(1, 2, 3, 3), sampled_prompts=("4", "full"))
    curriculum = config.curriculum(TARGET)
    shapes = [(round(s.nominal_speedup), len(s.prompt_layers())) for s in curriculum.goals]
    assert shapes == [(3, 12), (1, 12), (2, 12), (3, 4), (2, 4)]  # each once, and full depth has no other prompt
    drawn = [curriculum.schedule_at(step) for step in range(700)]
    deep, full, shallow, deep_split, shallow_split = (drawn.count(goal) for goal in curriculum.goals)
    assert deep > 1.5 * shallow > shallow > 40 < full
    assert deep_split > 1.5 * shallow_split > 40
    reseeded = replace(config, seed=6).curriculum(TARGET)
    assert drawn[:20] != [reseeded.schedule_at(step) for step in range(20)]
    with pytest.raises(ScheduleError, match="prompt layers"):
        replace(config, sampled_prompts=("13",)).curriculum(TARGET)


def test_schedules_that_differ_have_names_that_differ() -> None:
    # Budgets of their own: the linear ones of the same speed-up would have the same name.
    curve = Schedule(12, Schedule.even(12, (4,)).drop_order, (7, 6, 6, 6), family="calibrated", speedup=2)
    config = TuneConfig(sampled_speedups=(1, 2, 2, 3), sampled_prompts=("4",))
    curriculum = config.curriculum(curve)
    assert curriculum.target == curriculum.goals[0] == curve
    names = [goal.name for goal in curriculum.goals]
    assert names[:4] == ["calibrated-2x", "full", "calibrated-sampled-2x", "calibrated-3x"]
    assert len(set(names)) == len(names) == 7
    assert [schedule.name for schedule in curriculum.others].count("calibrated-sampled-2x") == 2  # named twice


def test_the_nominal_speed_up_of_the_target_is_the_target_whatever_its_budgets() -> None:
    floored = Schedule(12, Schedule.even(12, (4,)).drop_order, (9, 5, 5, 5), family="calibrated")
    config = TuneConfig(sampled_speedups=(1, 3, *[floored.nominal_speedup] * 2))
    curriculum = config.curriculum(floored)
    drawn = [curriculum.schedule_at(step) for step in range(400)]
    assert len(curriculum.goals) == 3
    assert 160 < drawn.count(floored) < 240  # two of four


EVEN = Schedule.even(12, TARGET.budgets)


@pytest.mark.parametrize(
    ("target", "speedups", "expected"),
    [
        (TARGET, (), [("skipdecode-3x", 12)]),
        (Schedule.full(12), (1,), [("full", 12)]),
        (EVEN, (2,), [(EVEN.name, 12), ("even-2x", 12)]),
        (TARGET.with_prompt((0, 1, 2, 3)), (1, 2), [("skipdecode-p4-3x", 4), ("full", 12), ("skipdecode-p4-2x", 4)]),
    ],
)
def test_sampled_schedules_are_the_target_s_at_other_speed_ups(
    target: Schedule, speedups: tuple[float, ...], expected: list[tuple[str, int]]
) -> None:
    curriculum = TuneConfig(sampled_speedups=speedups).curriculum(target)
    assert [(goal.name, len(goal.prompt_layers())) for goal in curriculum.goals] == expected
    assert {curriculum.schedule_at(step) for step in range(20)} == {*curriculum.goals}
    for goal in curriculum.goals:
        assert goal.is_full or goal.drop_order == target.drop_order
        assert all(set(target.layers(i)) <= set(goal.layers(i)) for i in range(25))  # nested in each other


def test_flat_targets_are_sampled_flat_and_full_depth_cannot_be() -> None:
    flat = replace(Schedule.constant(12, 4), name="", family="pruned", speedup=3)
    curriculum = TuneConfig(sampled_speedups=(2,)).curriculum(flat)
    assert [(s.name, s.budgets) for s in curriculum.goals] == [("pruned-3x", (4,)), ("pruned-2x", (6,))]
    with pytest.raises(ScheduleError, match="no drop order to sample 2x from: give a schedule that skips layers"):
        TuneConfig(sampled_speedups=(2,)).curriculum(Schedule.full(12))


def test_learning_rate_rises_then_falls_to_almost_nothing() -> None:
    config = TuneConfig(steps=100, learning_rate=1.0, warmup_fraction=0.1)
    rates = [config.learning_rate_at(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert TuneConfig(warmup_fraction=0, learning_rate=1.0).learning_rate_at(0) == 1.0
