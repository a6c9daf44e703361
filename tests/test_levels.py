"""Fewer levels of a budget curve: never fewer layers anywhere, never rising, and no other choice loses less."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import Schedule
from skipdecode.errors import ScheduleError
from skipdecode.schedule.levels import fewest_levels
from skipdecode.schedule.order import bottom_up

LAYERS = 12
CURVES = st.lists(st.integers(2, LAYERS), min_size=1, max_size=24).map(lambda b: tuple(sorted(b, reverse=True)))
ROWS = st.none() | st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)


def schedule_of(budgets: tuple[int, ...]) -> Schedule:
    return Schedule(LAYERS, bottom_up(LAYERS, 1), budgets)


def layers_run(schedule: Schedule, rows: tuple[int, ...] | None) -> int:
    rows = (schedule.seq_len + 1,) if rows is None else rows
    return sum(schedule.budget(i) for n in rows for i in range(n - 1))


def lost(given: Schedule, made: Schedule, rows: tuple[int, ...] | None) -> float:
    full = layers_run(Schedule.full(LAYERS), (given.seq_len + 1,) if rows is None else rows)
    saved = full - layers_run(given, rows)
    return (layers_run(made, rows) - layers_run(given, rows)) / saved if saved else 0.0


LIMITS = st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0])


@given(CURVES, LIMITS, ROWS)
def test_no_position_loses_a_layer_and_the_loss_is_what_it_says(budgets, limit, rows):
    before = schedule_of(budgets)
    after, share = fewest_levels(before, most_lost=limit, new_tokens=rows)
    assert all(a >= b for a, b in zip(after.budgets, budgets, strict=True))
    assert after.budgets[0] == budgets[0]
    assert set(after.budgets) <= set(budgets)
    assert (after.drop_order, after.prompt_layers()) == (before.drop_order, before.prompt_layers())
    assert all(set(after.layers(i + 1)) <= set(after.layers(i)) for i in range(len(budgets)))
    assert share == pytest.approx(lost(before, after, rows))
    assert 0 <= share <= limit


def least_lost(before: Schedule, levels: int, rows: tuple[int, ...] | None) -> float:
    """Of all choices of so many levels."""
    values = sorted(set(before.budgets), reverse=True)
    choices = []
    for kept in combinations(values[1:], levels - 1):
        rounded = tuple(min(v for v in (values[0], *kept) if v >= b) for b in before.budgets)
        choices.append(lost(before, schedule_of(rounded), rows))
    return min(choices)


@given(CURVES, LIMITS, ROWS)
def test_nothing_loses_less_and_one_level_less_would_lose_more_than_the_limit(budgets, limit, rows):
    before = schedule_of(budgets)
    after, share = fewest_levels(before, most_lost=limit, new_tokens=rows)
    levels = len(set(after.budgets))
    assert share == pytest.approx(least_lost(before, levels, rows))
    if levels > 1:
        assert least_lost(before, levels - 1, rows) > limit


def test_the_papers_curve_at_2x():
    before = Schedule.from_speedup(32, 2, 127)
    after, share = fewest_levels(before)
    assert len(set(before.budgets)) == 11
    assert len(set(after.budgets)) == 8
    assert 0 < share < 0.02
    assert len(set(fewest_levels(before, most_lost=0.1).schedule.budgets)) <= 4
    assert fewest_levels(before, most_lost=0) == (before, 0)


def test_levels_that_make_no_sense_are_refused():
    full = Schedule.full(4)
    assert fewest_levels(full) == (full, 0)
    for call in (
        lambda: fewest_levels(full, new_tokens=()),
        lambda: fewest_levels(full, new_tokens=(0,)),
        lambda: fewest_levels(full, most_lost=1.5),
    ):
        with pytest.raises(ScheduleError):
            call()
