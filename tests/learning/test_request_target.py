"""The speed-up that `prepare` plans, from a measurement of whole requests."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import skipdecode
from skipdecode.cost.model import CostModel
from skipdecode.data.examples import Example
from skipdecode.learning import request_target
from skipdecode.learning.goal import set_goal
from skipdecode.learning.request_target import target_of_steps
from skipdecode.learning.settings import CalibrationSettings
from tuning_data import LAYERS, save_model

SETTINGS = CalibrationSettings(target_speedup=1.5, prompt_depths=("full",))
COST = CostModel.of_step(LAYERS, 2, 1.0, 1.0)
EXAMPLES = [Example(str(n), (5, 6, 7 + n), (8,) * (6 + n)) for n in range(4)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    return skipdecode.load(save_model(tmp_path_factory.mktemp("target") / "model"))


def planned(loaded, target: float, gain: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """The plan for a target, if the schedule for it speeds requests up by a share of its gain."""

    def measured(goal, *_: object) -> float:
        return 1 + gain * (goal.workload.speedup(goal.paper) - 1)

    monkeypatch.setattr(request_target, "_request_speedup", measured)
    return target_of_steps(replace(SETTINGS, target_speedup=target), COST, loaded, EXAMPLES, 2, math.inf)


@pytest.mark.parametrize("gain", [0.8, 1.2])
def test_requests_of_the_plan_reach_the_target(loaded, gain: float, monkeypatch: pytest.MonkeyPatch):
    target = planned(loaded, 1.5, gain, monkeypatch)
    goal = set_goal(SETTINGS, COST, 3, [len(example.response) for example in EXAMPLES], LAYERS)
    full, skipping = goal.workload.full_seconds, goal.workload.seconds(goal.paper)
    measured = 1 + gain * (full / skipping - 1)
    outside = (full - measured * skipping) / (measured - 1)  # time that both sides have
    assert (full + outside) / (full / target + outside) == pytest.approx(1.5)


def test_what_is_measured_alike_or_cannot_be_made_up_for_changes_nothing(loaded, monkeypatch: pytest.MonkeyPatch):
    for target, gain in ((1.5, 1.01), (1.8, 0.5), (1.5, -0.1)):  # the bound is 1.92
        assert planned(loaded, target, gain, monkeypatch) == target


def test_requests_are_decoded_and_timed(loaded):
    assert 0 < target_of_steps(SETTINGS, COST, loaded, EXAMPLES, 2, math.inf) <= 1.5 * 1.5
