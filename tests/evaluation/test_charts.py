"""Pictures: every curve can be told from the others, and nothing empty is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import image

from skipdecode.evaluation.charts import Chart, Point, Series, save_charts, styles_of


def test_many_curves_all_look_different():
    styles = styles_of([Chart([Series(f"run {number}", [Point(1, 1)]) for number in range(27)], "x", "y")])
    assert len({(style["color"], style["marker"], style["linestyle"]) for style in styles.values()}) == 27


def test_charts_without_points_are_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full, empty = Chart([Series("a", [Point(1, 2), Point(2, 3)])], "x", "y"), Chart([Series("a", [])], "x", "y")
    save_charts([empty, empty], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert "none.png" in capsys.readouterr().err
    save_charts([empty, full], tmp_path / "one.png")
    save_charts([full, full], tmp_path / "two.png")
    one, two = (image.imread(tmp_path / name) for name in ("one.png", "two.png"))
    assert two.shape[1] == 2 * one.shape[1]
