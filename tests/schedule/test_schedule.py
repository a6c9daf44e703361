"""Schedules: what runs where, what is refused, and JSON."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipdecode import Schedule
from skipdecode.errors import ScheduleError
from skipdecode.schedule.order import prompt_set, top_down


def test_paper_is_linear_bottom_up_with_warm_up_and_last_layer_kept():
    s = Schedule.paper(12, min_exit_layer=4, max_exit_layer=8, seq_len=5)
    assert s.budgets == (8, 7, 6, 5, 4)
    assert s.layers(0) == (0, 5, 6, 7, 8, 9, 10, 11)
    assert s.layers(4) == (0, 9, 10, 11)
    assert s.layers(10_000) == s.layers(4)
    assert s.prompt_layers() == tuple(range(12))
    assert s.nominal_speedup == pytest.approx(2.0)


@pytest.mark.parametrize(("layers", "speedup", "most", "least"), [(16, 2, 11, 5), (30, 2, 20, 10), (24, 1, 24, 24)])
def test_from_speedup_keeps_the_papers_mean(layers, speedup, most, least):
    s = Schedule.from_speedup(layers, nominal_speedup=speedup, seq_len=64)
    assert (s.budgets[0], s.budgets[-1]) == (most, least)
    assert s.nominal_speedup == pytest.approx(speedup, rel=0.02)


def test_even_leaves_evenly_spaced_layers():
    assert Schedule.even(9, 5).layers(0) == (0, 2, 4, 6, 8)
    s = Schedule.even(30, (20, 15, 10))
    gaps = [b - a for a, b in zip(s.layers(2), s.layers(2)[1:], strict=False)]
    assert max(gaps) - min(gaps) <= 1
    gaps = [b - a for a, b in zip(s.layers(0), s.layers(0)[1:], strict=False)]
    assert max(gaps) <= 3


def test_other_methods_are_points_of_the_same_space():
    assert Schedule(6, top_down(6, 1), (5, 3)).layers(1) == (0, 1, 2)
    assert Schedule.constant(6, 3).layers(0) == (0, 4, 5)
    assert Schedule.constant(6, 4, drop_order=(3, 1, 2)).layers(7) == (0, 2, 4, 5)


def test_a_split_schedule_gives_each_token_its_half():
    s = Schedule.split(8, 4, 5, name="halves")
    assert s.prompt_layers() == (0, 1, 2, 3)
    assert s.layers(0) == s.layers(99) == (0, 4, 5, 6, 7)
    assert s.projected == (4, 5, 6, 7)
    assert s.last_prompt_layers() == tuple(range(8))
    assert not s.is_full
    assert Schedule.split(8, 8, 5).prompt_layers() == Schedule.constant(8, 5).prompt_layers()
    assert Schedule.split(8, 4, (6, 5), warmup_layers=2).layers(1) == (0, 1, 5, 6, 7)


def test_a_prompt_set_is_more_less_or_other_than_position_0():
    more = Schedule.constant(6, 3, prompt=(0, 1, 4, 5))
    assert (more.prompt_layers(), more.projected) == ((0, 1, 4, 5), ())
    other = Schedule.constant(6, 3, prompt=[2, 0, 1])
    assert (other.prompt_layers(), other.projected, other.last_prompt_layers()) == ((0, 1, 2), (4, 5), (0, 1, 2, 4, 5))
    assert Schedule.constant(6, 3, prompt="max_exit").projected == ()
    cheap_prompt = Schedule(6, (), (6,), prompt=(0, 1, 2))
    assert not cheap_prompt.is_full
    assert cheap_prompt.projected == (3, 4, 5)


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("full", "full"),
        ("max_exit", "max_exit"),
        ("4", (0, 1, 2, 3)),
        ("12", "full"),
        ("0-3,7", (0, 1, 2, 3, 7)),
        ("7, 0-2,1", (0, 1, 2, 7)),
        ("0,0", (0,)),
        ("0-11", "full"),
    ],
)
def test_a_prompt_set_is_read_from_text(text, prompt):
    assert prompt_set(text, 12) == prompt


@pytest.mark.parametrize("text", ["", "0", "13", "-3", "3-1", "0-12", "0-", "half", "0;3", "1.5", "0-999999999999"])
def test_a_prompt_set_that_is_none_is_named(text):
    with pytest.raises(ScheduleError, match=re.escape(repr(text))):
        prompt_set(text, 12)


def test_another_prompt_set_changes_nothing_else_and_shows_in_the_name():
    schedule = Schedule.from_speedup(12, 3, 20)
    other = schedule.with_prompt((0, 1, 2))
    assert (other.prompt, other.budgets, other.name) == ((0, 1, 2), schedule.budgets, "skipdecode-p3-3x")
    assert other.with_speedup(2).name == "skipdecode-p3-2x"
    assert other.with_prompt("full").name == "skipdecode-p12-3x"
    assert Schedule.full(12).with_prompt((0, 1)).projected == tuple(range(2, 12))


def test_names_are_labels_and_nothing_is_read_out_of_them():
    named = Schedule.from_speedup(12, 3, 20, name="mine-5x")
    assert (named.name, named.with_speedup(2).name) == ("mine-5x", "mine-5x-2x")
    made = Schedule(12, (1, 2), (10,), family="mine", speedup=1.5)
    assert (made.name, made.with_speedup(1.2).name) == ("mine-1.5x", "mine-1.2x")
    again = Schedule.from_json(made.with_prompt((0, 1)).to_json())
    assert (again.name, again.with_speedup(1.2).name) == ("mine-p2-1.5x", "mine-p2-1.2x")


def test_files_without_a_family_load_and_keep_their_bytes():
    data = {"num_layers": 6, "drop_order": [1], "budgets": [5], "warmup_layers": 1, "prompt": "full", "name": "old-2x"}
    assert Schedule.from_dict(data).to_dict() == data
    assert Schedule.from_dict({k: v for k, v in data.items() if k != "name"}).name == "custom"


def test_degenerate_schedules():
    assert Schedule.paper(4, min_exit_layer=4, max_exit_layer=4, seq_len=9).is_full
    assert Schedule.full(1).layers(3) == (0,)
    one = Schedule.paper(8, min_exit_layer=3, max_exit_layer=6, seq_len=1)
    assert (one.budget(0), one.budget(1)) == (6, 3)
    flat = Schedule.paper(8, min_exit_layer=5, max_exit_layer=5, seq_len=10)
    assert flat.is_flat
    assert not flat.is_full


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Schedule(6, (1, 2), (5, 6)), "not nested.*6 at position 1"),
        (lambda: Schedule(6, (0, 1), (5,)), "warm-up layer 0"),
        (lambda: Schedule(6, (1, 5), (5,)), "last layer 5"),
        (lambda: Schedule(6, (1, 1), (5,)), "twice"),
        (lambda: Schedule(6, (9,), (5,)), "accepted are 0 to 5"),
        (lambda: Schedule(6, (1,), (4,)), "budget 4 at position 0.*give 5 to 6"),
        (lambda: Schedule(6, (1,), ()), "budgets is empty"),
        (lambda: Schedule(6, (1,), (5.0,)), "5.0.*whole number"),
        (lambda: Schedule(6, "12", (5,)), "drop_order"),
        (lambda: Schedule(0, (), (1,)), "num_layers=0"),
        (lambda: Schedule(True, (), (1,)), "num_layers=True"),
        (lambda: Schedule(6, (), (6,), warmup_layers=7), "warmup_layers=7"),
        (lambda: Schedule(6, (), (6,), prompt="half"), "'full', 'max_exit' or"),
        (lambda: Schedule(6, (), (6,), prompt=(0, 6)), "prompt names layer 6: accepted are 0 to 5"),
        (lambda: Schedule(6, (), (6,), prompt=(1, 2)), "prompt leaves out layer 0"),
        (lambda: Schedule(6, (), (6,), prompt=(0, 1.5)), "1.5.*whole number"),
        (lambda: Schedule.split(6, 7, 3), "prompt_layers=7 is not accepted: give 1 to 6"),
        (lambda: Schedule.paper(6, min_exit_layer=5, max_exit_layer=4, seq_len=3), "swap them"),
        (lambda: Schedule.paper(6, min_exit_layer=2, max_exit_layer=4, seq_len=0), "seq_len=0"),
        (lambda: Schedule.paper(6, min_exit_layer=1, max_exit_layer=4, seq_len=3), "budget 1 at position 2"),
        (lambda: Schedule.from_speedup(6, 4, 10), "at most 3.00 is possible"),
        (lambda: Schedule.from_speedup(6, 0.5, 10), "nominal speed-up of 0.5"),
        (lambda: Schedule.from_speedup(6, float("nan"), 10), "nominal speed-up of nan"),
        (lambda: Schedule(6, (), (6,), speedup="2x"), "speedup='2x'"),
        (lambda: Schedule.from_json("{"), "must be JSON"),
        (lambda: Schedule.from_json("[1]"), "JSON object, not list"),
        (lambda: Schedule.from_json('{"num_layers": 6, "drop_order": []}'), "'budgets' is missing"),
        (lambda: Schedule.from_dict(Schedule.full(6).to_dict() | {"exit": 3}), "unknown schedule field 'exit'"),
        (lambda: Schedule.full(6).layers(-1), "position=-1"),
        (lambda: Schedule.from_speedup(6, 2, 4, warmup_layers="1"), "warmup_layers='1'"),
        (lambda: Schedule.full(6).check_fits(7), "6 layers, but the model has 7"),
    ],
)
def test_what_is_refused_says_which_value_and_what_is_accepted(make, says):
    with pytest.raises(ScheduleError, match=says) as error:
        make()
    assert "\n" not in str(error.value)


@st.composite
def schedules(draw):
    layers = draw(st.integers(2, 40))
    warm_up = draw(st.integers(0, layers - 1))
    order = draw(st.permutations(range(warm_up, layers - 1)))
    floor = max(1, layers - len(order))
    budgets = sorted(draw(st.lists(st.integers(floor, layers), min_size=1, max_size=30)), reverse=True)
    own = st.sets(st.integers(0, layers - 1)).map(lambda some: tuple(some | set(range(max(1, warm_up)))))
    prompt = draw(st.one_of(st.sampled_from(["full", "max_exit"]), own))
    return Schedule(layers, tuple(order), tuple(budgets), warm_up, prompt)


@given(schedules())
def test_a_file_has_each_budget_once_and_gives_the_schedule_back(s):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "s.json"
        s.save(file)
        assert Schedule.load(file) == s
        written = json.loads(file.read_text())["budgets"]
    assert len(written.split(",")) == len(set(s.budgets))


@pytest.mark.parametrize("budgets", ["", "6*", "6*2,", "six", "6*0", "6*1000001", "6*999999, 5*2", "5, 6"])
def test_runs_of_budgets_that_are_none_are_refused(budgets):
    with pytest.raises(ScheduleError, match="budgets"):
        Schedule.from_dict(Schedule.full(6).to_dict() | {"drop_order": [1, 2, 3], "budgets": budgets})


@given(schedules())
def test_sets_are_nested_and_json_goes_round(s):
    assert Schedule.from_json(s.to_json()) == s
    assert json.loads(s.to_json(indent=2)) == s.to_dict()
    for position in range(s.seq_len + 2):
        now, later = set(s.layers(position)), set(s.layers(position + 1))
        assert later <= now
        assert len(now) == s.budget(position)
        assert set(range(s.warmup_layers)) | {s.num_layers - 1} <= later
        for layer in range(s.num_layers):
            drop = s.drop_position(layer)
            assert (layer in now) == (drop is None or position < drop)
    assert s.mean_budget(3) == pytest.approx(sum(len(s.layers(i)) for i in range(3)) / 3)
    assert {*s.prompt_layers(), *s.projected} >= set(s.layers(0))
    assert not {*s.prompt_layers()} & {*s.projected}
    flat = s.flattened()
    assert flat.is_flat
    assert abs(flat.mean_budget() - s.mean_budget()) <= 0.5


def test_weights_bear_schedules_that_run_at_least_the_layers_they_were_tuned_under() -> None:
    tuned = Schedule.from_speedup(30, 2, 41)
    milder, longer = Schedule.from_speedup(30, 1.5, 41), Schedule.from_speedup(30, 2, 128)
    assert all(s.fits_weights((tuned,)) for s in (tuned, milder, longer, Schedule.full(30)))
    deeper, shorter = Schedule.from_speedup(30, 3, 41), Schedule.from_speedup(30, 2, 20)
    other_order = Schedule.even(30, tuned.budgets)
    prompts = Schedule.from_speedup(30, 2, 41, prompt="max_exit")
    assert not any(s.fits_weights((tuned,)) for s in (deeper, shorter, other_order, prompts))
    assert shorter.fits_weights((tuned, deeper))
    assert Schedule.full(30).fits_weights(())
    assert not milder.fits_weights(())
