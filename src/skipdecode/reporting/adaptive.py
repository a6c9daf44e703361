"""The section on depth by difficulty: methods at equal time, the depths of requests, shallow and deep ones."""

from __future__ import annotations

from skipdecode.reporting.page import Picture, Sample, Section, table
from skipdecode.reporting.plots.lines import Chart, Point, Series
from skipdecode.reporting.sources import Source

__all__ = ["adaptive_section"]

_STATIC = "Static: the depth, or the mix of two by lot, that takes as long. Losses are nats a token, of references."
_COLUMNS = {"task": "{task}", "method": "{method}", "request": "{request_speedup:.2f}x", "layers": "{mean_layers:.1f}"}
for _label, _name, _form in (("loss", "loss", ".4f"), ("ROUGE-L", "rougeL", ".1f"), ("BERT-F", "bertscore_f1", ".1f")):
    _bounds = [f"{{against_static[{_name}][{i}]:+{_form}}}" for i in range(3)]
    _COLUMNS |= {_label: f"{{{_name}:{_form}}}", f"{_label} beyond static's": "{} ({} to {})".format(*_bounds)}


def adaptive_section(source: Source) -> Section:
    """A result of benchmarks/adaptive.py."""
    runs, pictures = source.data["runs"], []
    shown = [run for run in runs if run.get("depths") and run["task"] == runs[0]["task"]]
    if depths := sorted({int(depth) for run in shown for depth in run["depths"]}):
        points = [[Point(i, run["depths"].get(str(d), 0) / run["n"]) for i, d in enumerate(depths)] for run in shown]
        names = map("{method} {request_speedup:.2f}x".format_map, shown)
        series, ticks = list(map(Series, names, points)), list(map(str, depths))
        chart = Chart(series, "layers of a request", "share of requests", from_zero=True, ticks=ticks)
        words = "; ".join(f"{one.name}: {', '.join(f'{p.y:.0%}' for p in one.points)}" for one in series)
        caption = f"Mean layers of each request's new tokens: {runs[0]['task']}"
        pictures.append(Picture(chart, caption, f"Share of requests at {', '.join(ticks)} layers. {words}."))
    samples: list[Sample] = [
        (each["prompt"], [(name, [(text, False)]) for name, text in each["texts"].items()])
        for each in source.data.get("examples", ())
    ]
    numbers = table(f"{source.name}: equal measured time of requests, 95% intervals", runs, _COLUMNS, pinned=2)
    return Section(f"Depth by difficulty: {source.name}", _STATIC, pictures=pictures, tables=[numbers], samples=samples)
