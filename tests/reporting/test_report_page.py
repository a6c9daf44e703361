"""The report in a real browser: offline, on a desktop and a phone, in light and dark."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from page_tools import DESKTOP, PHONE, serious
from quality_runs import quality_runs
from skipdecode.cli import main

ROOT = Path(__file__).parents[2]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium: install it (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bert_score")
    path = tmp_path_factory.mktemp("report")
    quality_runs(path / "runs")
    out = path / "report.html"
    assert main(["report", str(path / "runs"), str(ROOT / "results"), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_asks_for_nothing_fits_and_is_accessible(page_file: Path, size: tuple[int, int], scheme: str):
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        options = {"viewport": {"width": size[0], "height": size[1]}, "color_scheme": scheme, "offline": True}
        page = browser.new_context(**options).new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        assert asked == [page_file.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
        assert serious(page) == []
        # Pictures take the scheme's ink.
        ink = page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")
        assert ink == page.evaluate("getComputedStyle(document.body).color")
        browser.close()


@pytest.mark.parametrize(("size", "kept"), [(DESKTOP, 4), (PHONE, 1)], ids=["desktop", "phone"])
def test_wide_tables_keep_the_run_and_what_it_keeps_in_view(page_file: Path, size: tuple[int, int], kept: int):
    with sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(viewport={"width": size[0], "height": size[1]}).new_page()
        page.goto(page_file.as_uri())
        box = page.locator(".wide:has(td.pin4)").first
        box.evaluate("box => (box.scrollLeft = box.scrollWidth)")
        left = box.bounding_box()["x"]
        row = box.locator("tbody tr").nth(2)
        places = [row.locator(f".pin{i}").bounding_box()["x"] - left for i in range(kept + 1)]
        assert places[0] == pytest.approx(0, abs=1)
        # Side by side within the view, none over another.
        assert places == sorted(places)
        assert len({round(place) for place in places}) == kept + 1
        assert places[-1] < size[0] / 2 + 60
        last = row.locator("td").last.bounding_box()
        assert last["x"] + last["width"] <= left + box.bounding_box()["width"] + 1
        browser.close()
