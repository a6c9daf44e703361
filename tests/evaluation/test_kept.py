"""What prepared schedules keep, from documents of `skipdecode eval`."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib import image

from skipdecode.common.tables import figures
from skipdecode.evaluation import pictures
from skipdecode.evaluation.compare import impossible, kept_columns, near_zero, row_name, rows_of, with_kept
from skipdecode.evaluation.pictures import Chart, Point, Series, kept_charts, save_charts


def run(name: str, score: float, request: float | None, nominal: float = 2.0, **more: Any) -> dict[str, Any]:
    speed = {"nominal_speedup": nominal, "decode_speedup": 1.0, "request_speedup": request}
    return {"name": name, "metrics": {"rougeL": {"score": score}}, **speed, **more}


def share(estimate: float) -> dict[str, Any]:
    """The entry of a run for what it keeps of full depth in the same evaluation."""
    return {"kept": {"rougeL": {"estimate": estimate, "low": estimate - 0.1, "high": estimate + 0.05, "level": 0.95}}}


def evaluated(minutes: float, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"minutes": minutes, **row} for row in rows_of({"runs": runs})]


def test_a_schedule_that_shortens_prompts_alone_is_not_full_depth():
    full, other = run("full", 50, 1.02, 1.0), run("calibrated-p4-8", 40, 1.35, 1.0)
    full["metrics"]["bleu"], other["metrics"]["bleu"] = {"score": 4.3}, {"score": 3.2}  # few words: does not decide
    rows = with_kept(rows_of({"runs": [full, other]}))
    assert [(row["full_depth"], row["request_speedup"], row["kept"]) for row in rows] == [
        (True, 1.0, 1.0),
        (False, 1.35, pytest.approx(0.8)),
    ]


def test_fewer_layers_in_more_time_are_told():
    rows = with_kept(evaluated(0, run("full", 50, 1.0, 1.0), run("slower", 45, 2.86, 1.5), run("target", 40, 2.12)))
    (warning,) = impossible(rows)
    assert "target, with fewer layers than slower, was measured 2.12x against 2.86x" in warning


def test_the_picture_has_full_depth_a_line_for_each_checkpoint_and_the_intervals_that_are_known():
    fit = evaluated(0, run("full", 20, 1.0), run("target", 10, 1.5, **share(0.5)))
    tuned = evaluated(10, run("full", 50, 1.0), run("target", 45, 1.5, **share(0.9)), run("unmeasured", 40, None))
    rows = with_kept([*fit, *tuned])
    by_speed, over_minutes = kept_charts(rows, {0.0: 0.2, 10.0: 0.9}, "target", "model")
    before, after, full = by_speed.series
    assert (full.points[0].x, full.points[0].y, full.points[0].label) == (1, 100, "1.0x, 100%")
    assert [(p.x, p.y) for p in before.points] == [(1, pytest.approx(40)), (1.5, pytest.approx(20))]
    assert [(p.x, p.y) for p in after.points] == [(1, pytest.approx(100)), (1.5, pytest.approx(90))]
    assert after.points[-1].label == "1.50x, 90%"
    # What an interval compares with must be what the share compares with: here full depth after 10 minutes.
    assert before.points[-1].bounds is None
    assert after.points[-1].bounds == pytest.approx((80, 95))
    (line,) = over_minutes.series
    assert [(p.x, p.y) for p in line.points] == [(0, pytest.approx(20)), (10, pytest.approx(90))]
    assert [p.bounds for p in line.points] == [None, pytest.approx((80, 95))]
    assert all(chart.title and chart.xlabel and chart.ylabel for chart in (by_speed, over_minutes))


def test_texts_of_the_model_itself_have_the_interval_of_their_perplexity():
    def row(name: str, ratio: float) -> dict[str, Any]:
        of_base = {"estimate": ratio, "low": ratio / 1.25, "high": ratio * 1.25}
        return {"name": name, "request_speedup": 1.5, "decode_speedup": 1.6, "of_base": of_base}

    _, target = with_kept(rows_of({"rows": [row("base", 1.0), row("target", 2.0)]}))
    assert target["kept"] == pytest.approx(0.5)
    assert target["kept_interval"] == pytest.approx({"low": 0.4, "high": 0.625})


@pytest.mark.parametrize("runs", [[run("target", 40, None)], [run("target", 0, 1.5)], []])
def test_without_a_measured_schedule_there_is_no_picture(runs: list[dict[str, Any]]):
    score = 0 if runs and runs[0]["metrics"]["rougeL"]["score"] == 0 else 50
    rows = with_kept(evaluated(0, run("full", score, 1.0), *runs))
    assert kept_charts(rows, {0.0: rows[-1]["kept"]}, "target", "model") == []


def test_a_score_near_zero_is_named_and_does_not_count():
    full, other = run("full", 50, 1.0, 1.0), run("other", 45, 1.5)
    full["metrics"]["bleu"], other["metrics"]["bleu"] = {"score": 2.2}, {"score": 3.4}
    rows = rows_of({"runs": [full, other]})
    assert near_zero(rows) == "BLEU 2.2 of 100"
    assert with_kept(rows)[1]["kept"] == pytest.approx(0.9)
    del full["metrics"]["rougeL"], other["metrics"]["rougeL"]
    assert [row["kept"] for row in with_kept(rows_of({"runs": [full, other]}))] == [None, None]


def test_a_score_that_the_records_tell_only_roughly_does_not_count_beside_others():
    full, other = run("full", 50, 1.0, 1.0), run("other", 45, 1.5)
    full["metrics"]["bleu"] = {"score": 8.0, "interval": {"low": 5.0, "high": 12.0}}
    other["metrics"]["bleu"] = {"score": 4.0}
    rows = rows_of({"runs": [full, other]})
    assert with_kept(rows)[1]["kept"] == pytest.approx(0.9)
    full["metrics"]["bleu"]["interval"]["low"] = 9.0
    assert with_kept(rows_of({"runs": [full, other]}))[1]["kept"] == pytest.approx(0.5)
    del full["metrics"]["rougeL"], other["metrics"]["rougeL"]
    full["metrics"]["bleu"]["interval"]["low"] = 5.0
    assert with_kept(rows_of({"runs": [full, other]}))[1]["kept"] == pytest.approx(0.5)


def test_rows_before_and_after_tuning_have_distinct_names_in_every_table():
    rows = [*evaluated(0, run("full", 50, 1.0)), *evaluated(6, run("full", 55, 1.0))]
    names = [row_name(row) for row in rows]
    assert names == ["full", "full, after 6 min"]
    lines = figures(kept_columns(with_kept(rows)) | {"x" * 40: "{minutes}" + " " * 60}, with_kept(rows))
    parts = sum(line.startswith("| schedule ") for line in lines)
    assert sum(line.startswith("| full, after 6 min") for line in lines) == parts > 1


def test_labels_of_points_do_not_overprint(monkeypatch: pytest.MonkeyPatch):
    drawn, spread = [], pictures.spread_labels
    monkeypatch.setattr(pictures, "spread_labels", lambda figure: drawn.append(figure) or spread(figure))
    points = [Point(1.5 + i / 1000, 90 + i / 100, label=f"1.{i}x, 90%") for i in range(6)]
    pictures.charts_png([Chart([Series("a", points)], "x", "y")])
    (axes,) = drawn[0].axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_charts_without_points_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full, empty = Chart([Series("a", [Point(1, 2), Point(2, 3)])], "x", "y"), Chart([Series("a", [])], "x", "y")
    save_charts([empty, empty], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert "none.png" in capsys.readouterr().err
    save_charts([empty, full], tmp_path / "one.png")
    save_charts([full, full], tmp_path / "two.png")
    one, two = (image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert two.shape[1] == 2 * one.shape[1]
