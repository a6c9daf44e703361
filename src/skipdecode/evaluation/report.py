"""A self-contained HTML report of runs: trade-off curves, intervals, lengths, sample outputs side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape

from skipdecode.evaluation.compare import Pair
from skipdecode.evaluation.plots import buckets_svg, tradeoff_svg
from skipdecode.evaluation.results import Run
from skipdecode.evaluation.tables import metric_names, pairs_cells, runs_cells

__all__ = ["html_report"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; margin: 2rem auto; max-width: 76rem;
  padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.86rem; }}
th, td {{ border-bottom: 1px solid #d8dee5; padding: 0.35rem 0.6rem; text-align: left; vertical-align: top; }}
thead th {{ border-bottom: 2px solid #8796a5; white-space: nowrap; }}
td.n {{ font-variant-numeric: tabular-nums; white-space: nowrap; }}
.charts {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
.charts svg {{ width: 25rem; max-width: 100%; height: auto; }}
.samples td {{ min-width: 13rem; max-width: 22rem; overflow-wrap: anywhere; white-space: pre-wrap; }}
pre {{ background: #f4f6f8; padding: 0.8rem; overflow-x: auto; font-size: 0.8rem; }}
.note {{ color: #55636f; max-width: 60rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""
_SPEED_NOTE = (
    "Measured speed-up is the time of one generated position at full depth over the method's, decoding only, on the "
    "same batches in turn; nominal speed-up counts layers. Scores are given with half the width of their 95% bootstrap "
    "interval."
)
_SHOWN_TEXT = 1200


def html_report(runs: Sequence[Run], pairs: Sequence[Pair] = (), *, title: str = "skipdecode eval") -> str:
    """The report as one HTML document without outside parts.

    Parameters
    ----------
    runs : sequence of Run
        At least one.
    pairs : sequence of Pair
        From `compare_runs`; left out if empty.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    metrics = metric_names(runs)
    sections = [
        _section("Runs", f"<p class='note'>{escape(_SPEED_NOTE)}</p>" + _table(runs_cells(runs))),
        _charts("Quality against measured speed-up", (tradeoff_svg(runs, metric) for metric in metrics)),
    ]
    if pairs:
        note = "<p class='note'>The same resampled records score both runs of a pair; 95% intervals.</p>"
        sections.append(_section("Paired differences", note + _table(pairs_cells(pairs))))
    for axis, heading in (("prompt_tokens", "By prompt length"), ("reference_tokens", "By reference length")):
        sections.append(_charts(heading, (buckets_svg(runs, axis, metric) for metric in metrics)))
    sections += [_samples(group) for group in _same_data(runs)]
    sections.append(_settings(runs))
    return _PAGE.format(title=escape(title), body="\n".join(filter(None, sections)))


def _section(heading: str, body: str) -> str:
    return f"<h2>{escape(heading)}</h2>\n{body}"


def _charts(heading: str, pictures: Iterable[str | None]) -> str:
    drawn = [picture for picture in pictures if picture is not None]
    return _section(heading, f"<div class='charts'>{''.join(drawn)}</div>") if drawn else ""


def _table(rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    cell_class = "" if kind else " class='n'"
    body = "".join(
        "<tr>" + "".join(f"<td{cell_class}>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows[1:]
    )
    table = f"<table class='{kind}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide'>{table}</div>"


def _same_data(runs: Sequence[Run]) -> list[list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(str(run.data["config"].get("data_sha256")), []).append(run)
    return list(groups.values())


def _samples(runs: Sequence[Run]) -> str:
    """Records that the runs of one data set have in common, a column a run."""
    by_id = [{sample["id"]: sample for sample in run.data["samples"]} for run in runs]
    rows = [["prompt", "reference", *(run.name for run in runs)]]
    for identity, sample in by_id[0].items():
        if all(identity in samples for samples in by_id):
            outputs = [samples[identity]["output"] for samples in by_id]
            rows.append([_short(text) for text in (sample["prompt"], sample["reference"], *outputs)])
    task = runs[0].data["config"].get("task", {}).get("name", "")
    return _section(f"Sample outputs {task}".strip(), _table(rows, "samples"))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + " …"


def _settings(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        kept = {name: run.data[name] for name in ("config", "environment")}
        signatures = {name: entry["signature"] for name, entry in run.data["metrics"].items()}
        text = json.dumps({**kept, "signatures": signatures}, indent=1, ensure_ascii=False)
        parts.append(f"<details><summary>{escape(run.name)}</summary><pre>{escape(text)}</pre></details>")
    return _section("How each run was made", "\n".join(parts))
