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
from skipdecode.schedule import Schedule
from tuning_data import LAYERS, save_model

SETTINGS = CalibrationSettings(target_speedup=1.5, prompt_depths=("full",))
COST = CostModel.of_step(LAYERS, 2, 1.0, 1.0)
EXAMPLES = [Example(str(n), (5, 6, 7 + n), (8,) * (6 + n)) for n in range(4)]
LENGTHS = [len(example.response) for example in EXAMPLES]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    return skipdecode.load(save_model(tmp_path_factory.mktemp("target") / "model"))


def planned(loaded, target: float, gain: float, monkeypatch: pytest.MonkeyPatch, full: float = 1.0) -> float:
    """The plan for a target, if the schedule for it speeds requests up by a share of its gain.

    `full`: time of a request at full depth with other weights, as a share of the time with the model's own.
    """

    def measured(schedule: Schedule, *_: object) -> tuple[float, float]:
        goal = set_goal(replace(SETTINGS, target_speedup=target), COST, 3, LENGTHS, LAYERS)
        return full, full / (1 + gain * (goal.workload.speedup(schedule) - 1))

    monkeypatch.setattr(request_target, "_request_times", measured)
    return target_of_steps(replace(SETTINGS, target_speedup=target), COST, loaded, EXAMPLES, 2, math.inf, "w8a8")


@pytest.mark.parametrize(("gain", "full"), [(0.8, 1.0), (1.2, 1.0), (0.9, 0.8), (1.1, 0.7)])
def test_requests_of_the_plan_reach_the_target(
    loaded, gain: float, full: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = planned(loaded, 1.5, gain, monkeypatch, full)
    goal = set_goal(SETTINGS, COST, 3, LENGTHS, LAYERS)
    steps = 1 / goal.workload.speedup(goal.paper)
    skipping = full / (1 + gain * (1 / steps - 1))
    # The time of a request is linear in the time of its steps.
    time = full - (full - skipping) * (1 - 1 / target) / (1 - steps)
    assert time == pytest.approx(1 / 1.5)


def test_few_layers_are_skipped_where_the_weights_alone_reach_the_target(
    loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(loaded, 1.5, 0.8, monkeypatch, full=1 / 1.6) == pytest.approx(1.05)
    assert "w8a8 weights alone make requests 1.60 times as fast" in capsys.readouterr().err


def test_what_is_measured_alike_or_cannot_be_made_up_for_changes_nothing(loaded, monkeypatch: pytest.MonkeyPatch):
    for target, gain in ((1.5, 1.01), (1.8, 0.5), (1.5, -0.1)):  # the bound is 1.92
        assert planned(loaded, target, gain, monkeypatch) == target


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_requests_are_decoded_and_timed(loaded, quantization: str) -> None:
    schedule = Schedule.from_speedup(LAYERS, 1.5, 64)
    full, skipping = request_target._request_times(schedule, loaded, quantization, EXAMPLES, 2, math.inf)
    assert (full == 1) == (quantization == "none")
    assert skipping > 0
