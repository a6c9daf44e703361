"""What prepared schedules keep, from documents of `skipdecode eval`."""

from __future__ import annotations

from typing import Any

import pytest

from skipdecode.reporting.kept import rows_of, speedups_that_keep, with_kept


def run(name: str, score: float, request: float, nominal: float = 2.0) -> dict[str, Any]:
    speed = {"nominal_speedup": nominal, "measured_speedup": 1.0, "measured_speedup_with_prompt": request}
    return {"name": name, "metrics": {"rougeL": {"score": score}}, **speed}


def test_a_schedule_that_shortens_prompts_alone_is_not_full_depth():
    found = with_kept(rows_of({"runs": [run("full", 50, 1.02, 1.0), run("calibrated-1.3x-wall", 40, 1.35, 1.0)]}))
    assert [(row["full_depth"], row["request_speedup"], row["kept"]) for row in found] == [
        (True, 1.0, 1.0),
        (False, 1.35, pytest.approx(0.8)),
    ]


def test_the_speed_up_that_keeps_a_share_starts_from_the_checkpoints_own_full_depth():
    def reached(full: float) -> dict[str, float | None]:
        before = run("full", 100, 1.0, 1.0)
        rows = with_kept(rows_of({"runs": [before, run("full", full, 1.0, 1.0), run("a", 97, 1.5), run("b", 93, 2.0)]}))
        return speedups_that_keep(rows[1:])

    assert reached(100) == {"99%": pytest.approx(1.167), "98%": pytest.approx(1.333), "95%": pytest.approx(1.75)}
    assert reached(80) == {"99%": None, "98%": None, "95%": pytest.approx(1.75)}
