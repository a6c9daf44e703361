"""`skipdecode report`: one page from any mix of results; what is broken is named in one line."""

from __future__ import annotations

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from html_page import read_page
from quality_runs import REFERENCES, quality_runs
from skipdecode import Schedule
from skipdecode.cli import main
from skipdecode.common.kinds import heading
from skipdecode.reporting.charts import Chart, Point, Series, styles_of
from skipdecode.reporting.quality import METRIC_NAMES
from skipdecode.reporting.sources import SHOWN

ROOT = Path(__file__).parents[2]
CALIBRATION: dict[str, Any] = {
    **heading("calibration"),
    "schedule": Schedule.constant(8, 4, name="calibrated-2x").to_dict(),
    "records": 6,
    "rounds": [
        {"base": 1.5, "losses": {str(i): 1.5 + i / 10 for i in range(1, 7)}},
        {"base": 1.6, "losses": {str(i): 1.7 + i / 10 for i in range(2, 7)}},
    ],
    "verdicts": [
        {"name": n, "speedup": 2.0, "mean_layers": 4, "measured": 1.875, "held_out": None}
        for n in ("paper", "calibrated-2x")
    ],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind, and names that would break a page that does not escape."""
    pytest.importorskip("bert_score")
    path = tmp_path_factory.mktemp("report")
    quality_runs(path / "runs")
    (path / "results").mkdir()
    (path / "results" / "calibration.json").write_text(json.dumps(CALIBRATION))
    other = heading("benchmark", "vllm-speed") | {"ratios": {"overhead": 0.015625}, "rows": [{"x": 3}]}
    (path / "results" / "other.json").write_text(json.dumps(other))
    hostile = Schedule(8, (3, 2, 1), (7, 6, 5), name='</script><b>"x" & y')
    (path / "hostile.json").write_text(hostile.to_json())
    return path


def report(out: Path, *arguments: str | Path) -> str:
    assert main(["report", *map(str, arguments), "--out", str(out), "--overwrite"]) == 0
    return out.read_text(encoding="utf-8")


def headings(page: str, tag: str) -> list[str]:
    return re.findall(rf"<{tag}(?: [^>]*)?>(.*?)</{tag}>", page)


def test_one_page_from_every_kind_of_result(place: Path, tmp_path: Path):
    files = [place / "runs", *sorted((place / "results").glob("*.json"))]
    files += [place / "hostile.json", *sorted((ROOT / "results").glob("*-cpu.json"))]
    files += [ROOT / "results" / "tune-e2e-smollm2-135m.jsonl"]
    html = report(tmp_path / "report.html", *files)
    page = read_page(html)
    assert page.links == []
    assert not re.search(r"<script|@import|url\((?!#)", html)
    for title in (
        "mine on checkpoint: 8 records",
        "Outputs side by side",
        "Engines: smollm2-135m",
        "Which layers run where",
        "Calibration:",
        "Loss while tuning",
        "Environment",
    ):
        assert title in page.text, title
    titles = [title for title in headings(html, "h2") if "mine" in title]
    assert sum(title == "mine on checkpoint: 8 records" for title in titles) == 2  # the card and the section
    # A score, a bench row, a calibration's loss, a dev loss: numbers of each source are on the page.
    bench = json.loads((ROOT / "results" / "bench-smollm2-135m-cpu.json").read_text())
    speedup = max(row["decode_speedup"] for row in bench["rows"])
    for number in (f"{speedup:.2f}x", "1.8750", "0.0589"):
        assert number in page.text, number
    assert all(text in page.text for text in REFERENCES)
    assert '</script><b>"x" & y' in page.text
    # Pictures take the page's colours and say what they show.
    assert html.count("<svg ") == len(re.findall(r'role="img" [^>]*aria-label="\w', html))
    assert "var(--c0)" in html
    assert any("calibrated-2x: importance of each layer" in label for label in page.labels)
    assert report(tmp_path / "again.html", *files) == html


def test_words_that_full_depth_did_not_write_are_marked(place: Path, tmp_path: Path):
    html = report(tmp_path / "r.html", place / "runs")
    assert "<mark>" not in html  # The canned methods write a beginning of what full depth writes.
    run = json.loads((place / "runs" / "flat-4x" / "run.json").read_text())
    for sample in run["samples"]:
        sample["output"] = sample["full_output"].replace(" ", " strange <i> ", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(run))
    html = report(tmp_path / "r.html", tmp_path / "run")
    assert re.search(r"<mark>\s?strange &lt;i&gt;\s?</mark>", html)


@pytest.mark.parametrize("pattern", ["[bst][ec]*-cpu.json*", pytest.param("*", marks=pytest.mark.slow)])
def test_a_directory_stands_for_its_results(pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "results").mkdir()
    for file in (ROOT / "results").glob(pattern):
        shutil.copy(file, tmp_path / "results")
    html = report(tmp_path / "r.html", tmp_path / "results")
    assert len(html.encode()) < 2_000_000
    kinds = [json.loads(p.read_text()[: 1 << 20])["kind"] for p in (tmp_path / "results").glob("*.json")]
    shown = sum(kind in SHOWN for kind in kinds) + len(list((tmp_path / "results").glob("*.jsonl")))
    told = capsys.readouterr()
    assert f"{shown} results" in told.out
    assert "serve-smollm2-135m-cpu (benchmark)" in told.err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("b.json", '{"x": 1}', "has no kind"),
        ("c.json", "[1]", "has no kind"),
        ("d.json", heading("evaluation"), "lacks 'name'"),
        ("e.json", heading("bench") | {"bandwidth_gb_s": 1, "rows": [{"engine": "fast"}]}, "row 1 lacks "),
        ("f.json", heading("bench") | {"bandwidth_gb_s": 1, "rows": 3}, "a list of rows is missing"),
        ("g.json", '{"drop_order": [0], "budgets": [9], "num_layers": 4}', "g.json: "),
        ("h.jsonl", '{"kind": "tuning", "format": 1}\n{"kind": "train", "step": 1}\n', "cross_entropy"),
        ("i.jsonl", '{"kind": "train"\n', "line 1: not JSON"),
        ("j.json", b"\xff\xfe", "not JSON"),
        ("k.json", heading("self-generated") | {"n": 1, "rows": [{"name": 3}]}, "row 1 lacks 'name'"),
        ("l.json", {"kind": "poem", "format": 1}, "'poem'"),
        ("m.json", {"kind": "bench", "format": 99}, "99"),
        ("n.jsonl", '{"kind": "bench", "format": 1}\n', 'accepted are files with "kind" tuning'),
    ],
)
def test_a_broken_file_is_named(
    tmp_path: Path, name: str, content: str | bytes | dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
):
    bad, out = tmp_path / name, tmp_path / "r.html"
    text = json.dumps(content) if isinstance(content, dict) else content
    bad.write_bytes(text if isinstance(text, bytes) else text.encode())
    good = str(ROOT / "results" / "bench-opt-1.3b-cpu.json")
    assert main(["report", good, str(bad), "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert message in line
    assert not out.exists()
    assert main(["report", good, str(bad), "--out", str(out), "--bad", "skip"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipdecode: skipped: ")
    assert name in line
    assert "Engines: opt-1.3b" in out.read_text()


@pytest.mark.parametrize(
    ("name", "first", "without"),
    [
        ("bench-smollm2-135m-cpu.json", '{\n "kind": "bench",\n "format": 1,', "{"),
        ("tune-e2e-smollm2-135m.jsonl", '{"kind": "tuning", "format": 1}\n', ""),
    ],
)
def test_a_result_of_an_older_version_is_refused_with_what_it_lacks(
    tmp_path: Path, name: str, first: str, without: str, capsys: pytest.CaptureFixture[str]
):
    text = (ROOT / "results" / name).read_text()
    assert text.startswith(first)
    (tmp_path / name).write_text(text.replace(first, without, 1))
    assert main(["report", str(tmp_path / name), "--out", str(tmp_path / "r.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in (name, '"kind"', '"format": 1'))


def test_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.json").write_text("{}")
    for arguments, message in (
        ([str(tmp_path / "none")], "no such file or directory"),
        ([str(tmp_path), "--bad", "skip"], "nothing to report"),
        ([str(ROOT / "results" / "serve-smollm2-135m-cpu.json")], "nothing to report"),
    ):
        assert main(["report", *arguments, "--out", str(tmp_path / "r.html")]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def sections(html: str) -> dict[str, str]:
    """The parts of the page by heading."""
    return {headings(part, "h2")[0]: part for part in html.split("<section ")[1:]}


def test_runs_of_two_models_are_compared_with_their_names(place: Path, tmp_path: Path):
    one, other = place / "runs" / "flat-2x", tmp_path / "other"
    shutil.copytree(one, other)
    run = json.loads((other / "run.json").read_text())
    run["config"]["model"] = "/secret/place/another"
    (other / "run.json").write_text(json.dumps(run))
    out = tmp_path / "r.html"
    assert main(["eval", "--compare", str(one), str(other), "--metrics", "bleu", "--report", str(out)]) == 0
    found = sections(out.read_text())
    assert [title for title in found if title.startswith("mine on ")] == [
        "mine on checkpoint: 8 records",
        "mine on another: 8 records",
    ]
    assert re.findall(r"<td>(checkpoint|another)</td>", found["Paired differences"]) == ["checkpoint", "another"]


def test_the_first_thing_on_the_page_is_how_much_faster_at_what_loss(place: Path, tmp_path: Path):
    run = json.loads((place / "runs" / "flat-2x" / "run.json").read_text())
    full = json.loads((place / "runs" / "full" / "run.json").read_text())
    run |= {"measured_speedup": 1.75, "measured_speedup_with_prompt": 1.5}
    run["kept"] = {m: {"estimate": 1.0, "low": 0.9, "high": 1.1} for m in ("bleu", "rougeL", "bertscore_f1")}
    run["kept"]["rougeL"] = {"estimate": 0.995, "low": 0.99, "high": 1.0}
    for name, document in (("2x", run), ("full", full)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(document))
    html = report(tmp_path / "r.html", tmp_path)
    words = re.sub(r"<.*?>", " ", html[html.index('<ul class="cards"') : html.index("<nav")])
    for expected in ("1.50x  whole request", "decoding 1.75x, nominal 2x", "keeps 99.5% [", "of ROUGE-L", "batch 3"):
        assert expected in words, expected


def test_a_run_is_in_one_table_with_its_full_depth(place: Path, tmp_path: Path):
    for name in ("full", "flat-4x"):
        (tmp_path / name).mkdir()
        shutil.copy(place / "runs" / name / "run.json", tmp_path / name)
    found = sections(report(tmp_path / "r.html", tmp_path))
    (part,) = [part for title, part in found.items() if title.startswith("mine on ")]
    assert METRIC_NAMES["full_depth_agreement"] in html.unescape(part)
    assert re.findall(r'<th scope="row" class="pin0">(.*?)</th>', part) == ["full", "flat-4x"]


def test_what_a_run_kept_of_full_depth_is_shown_with_its_interval(place: Path, tmp_path: Path):
    run = json.loads((place / "runs" / "flat-4x" / "run.json").read_text())
    run["kept"] = {"bleu": {"estimate": 0.625, "low": 0.5, "high": 0.75}, "rougeL": None}
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = read_page(report(tmp_path / "r.html", tmp_path / "run.json"))
    assert "62.5% [50.0,\N{NO-BREAK SPACE}75.0]" in page.text


def test_many_curves_all_look_different():
    styles = styles_of([Chart([Series(f"run {number}", [Point(1, 1)]) for number in range(27)], "x", "y")])
    assert len({(style["color"], style["marker"], style["linestyle"]) for style in styles.values()}) == 27
