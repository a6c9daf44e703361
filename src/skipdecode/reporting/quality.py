"""Sections on quality: the trade-off with speed, the runs in numbers, nominal and measured speed, paired differences.

A result comes from a run of `skipdecode eval` or from a row of a published table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.evaluation.compare import Pair, pairs_cells
from skipdecode.evaluation.results import Run
from skipdecode.evaluation.scores import IN_NATS
from skipdecode.reporting.page import Picture, Section, Table, Tile, table
from skipdecode.reporting.plots.lines import Chart, Point, Series, grouped, line_figure
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import curve_name

__all__ = ["METRIC_NAMES", "headlines", "nominal_sections", "pair_sections", "quality_sections", "quality_tiles"]

_HEADLINE = ("bleu", "rougeL", "bertscore_f1")
METRIC_NAMES = {
    "bleu": "BLEU",
    "rougeL": "ROUGE-L",
    "bertscore_f1": "BERTScore F",
    "chrf": "chrF",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "meteor": "METEOR",
    "cider": "CIDEr",
    "loss": "loss on references, nats a token (lower is better)",
    "kl": "KL from full depth, nats (lower is better)",
    "top1_agreement": "top-1 agreement with full depth, %",
    "token_agreement": "token agreement with full depth, %",
    "full_depth_agreement": "outputs that agree with full depth's, %",
    "exact_match": "outputs equal to full depth's, %",  # of older tables
}
_WORTH = 0.99
_TRADE_OFF = (
    "Higher and further right is better. Measured speed-up is full depth's time over the method's for the same "
    "decoding work on the same batches, in turn; the small numbers are nominal speed-ups, which count layers. Bars "
    "are 95% bootstrap intervals. The dashed line is full depth."
)
_NOMINAL = "Embeddings, the output head and attention do not shrink with the layers, so less than nominal is gained."
_PAIRED = "The same resampled records score both runs of a pair; 95% intervals."


@dataclass(frozen=True)
class _Bounded:
    """A value with its bounds, where they are known."""

    value: float
    bounds: tuple[float, float] | None = None

    def text(self, pattern: str = "{:.2f}") -> str:
        """``value [low, high]``."""
        if self.bounds is None:
            return pattern.format(self.value)
        return f"{pattern.format(self.value)} [{', '.join(pattern.format(b) for b in self.bounds)}]"


@dataclass(frozen=True)
class _Result:
    """What one method came to on one set of records.

    Results are drawn together only if they are on the same `data`; `curve` is the name without its speed-up. `speed` is
    the measured speed-up of decoding, `layers` the mean of a generated token; `kept` are shares of tuned full depth's
    scores.
    """

    data: str
    task: str
    name: str
    curve: str
    full: bool
    decoding: Mapping[str, Any] | None
    nominal: float | None
    speed: _Bounded | None
    layers: float | None
    scores: Mapping[str, _Bounded]
    kept: Mapping[str, _Bounded]


def _groups(sources: Sequence[Source]) -> list[list[_Result]]:
    """Results on the same records together, full depth first, then curve by curve.

    A run that stands in a table too counts once.
    """
    rows = [_of_row(s.data, row) for s in of_kind(sources, "quality-table") for row in s.data["runs"]]
    tabled = [_identity(result) for result in rows]
    runs = [_of_run(source.data) for source in of_kind(sources, "evaluation")]
    found = [result for result in runs if _identity(result) not in tabled] + rows
    found.sort(key=lambda r: (not r.full, r.curve, r.nominal or 0.0))
    return list(grouped(found, lambda r: r.data).values())


def _identity(result: _Result) -> tuple[Any, ...]:
    """What a run and its row in a table have in common, and no other: records, decoding, scores."""
    return result.data, result.decoding, {name: score.value for name, score in result.scores.items()}


def _of_run(run: Run) -> _Result:
    data, config = run.data, run.data["config"]
    speed = data.get("measured_speedup_interval")
    return _Result(
        data=f"{config.get('data_sha256')}, {data['n']}",
        task=f"{config.get('task', {}).get('name', '')}, {data['n']} records",
        name=run.name,
        curve=curve_name(run.name),
        full=config.get("method", {}).get("name") == "full",
        decoding=config.get("method"),
        nominal=data.get("nominal_speedup"),
        speed=_speed(run.measured_speedup, speed and (speed["low"], speed["high"])),
        layers=run.layers_per_token,
        scores={
            name: _Bounded(entry["score"], (entry["interval"]["low"], entry["interval"]["high"]))
            for name, entry in data["metrics"].items()
        },
        kept={},
    )


def _of_row(document: Mapping[str, Any], row: Mapping[str, Any]) -> _Result:
    task, nominal = document.get("task", {}), row.get("nominal_speedup")
    return _Result(
        data=f"{task.get('data_sha256')}, {row['n']}",
        task=f"{task.get('name', '')}, {row['n']} records",
        name=row["method"] + ("" if nominal is None else f" {nominal:.2g}x"),
        curve=row["method"],
        full=row["method"] == "full",
        decoding=row.get("decoding"),
        nominal=nominal,
        speed=_speed(row.get("measured_speedup"), row.get("measured_speedup_interval")),
        layers=row.get("mean_layers"),
        scores={name: _Bounded(row[name], (low, high)) for name, (low, high) in row["intervals"].items()},
        kept={
            name: _Bounded(share["share"], (share["low"], share["high"]))
            for name, share in row["retained"].items()
            if share is not None
        },
    )


def _speed(value: float | None, bounds: Sequence[float] | None) -> _Bounded | None:
    return None if value is None else _Bounded(value, (bounds[0], bounds[1]) if bounds else None)


# ---------------------------------------------------------------------- sections


def quality_sections(sources: Sequence[Source]) -> list[Section]:
    """The trade-off curves and the numbers of each set of records."""
    return [_quality(group) for group in _groups(sources)]


def _quality(group: Sequence[_Result]) -> Section:
    metrics = [m for m in METRIC_NAMES if any(m in r.scores for r in group)]
    pictures = [picture for metric in metrics if (picture := _trade_off(group, metric)) is not None]
    return Section(
        f"Quality against measured speed-up: {group[0].task}",
        _TRADE_OFF if pictures else "No speed was measured next to these scores.",
        pictures=pictures,
        shown=headlines(metrics),
        tables=[_numbers(group, metrics)],
    )


def headlines(metrics: Sequence[str]) -> int:
    """How many of the metrics a reader sees at once: the headline ones, which come first, or else one."""
    return sum(metric in _HEADLINE for metric in metrics) or 1


def _trade_off(group: Sequence[_Result], metric: str) -> Picture | None:
    shown = [r for r in group if metric in r.scores and r.speed is not None and not r.full]
    full = next((r.scores[metric] for r in group if r.full and metric in r.scores), None)
    if not shown and full is None:
        return None
    curves = grouped(shown, lambda r: r.curve)
    series = [Series(curve, [_point(r, metric) for r in results]) for curve, results in curves.items()]
    name, level = METRIC_NAMES[metric], None
    label = f"{name} against measured speed-up."
    if full is not None:
        series.append(Series("" if series else "full depth", (Point(1.0, full.value, y_bounds=full.bounds),), color=-1))
        level = (full.value, *(full.bounds or (full.value, full.value)), "full depth")
        label += f" Full depth: {full.value:.2f}."
    if shown:
        best = (min if metric in IN_NATS else max)(shown, key=lambda r: r.scores[metric].value)
        score = best.scores[metric].value
        label += f" The best of the others is {best.name} with {score:.2f} at {_measured(best):.2f}x."
    chart = Chart(series, "measured speed-up over full depth (decoding)", name, level=level)
    return Picture(line_figure(chart), label, label)


def _measured(result: _Result) -> float:
    return 0.0 if result.speed is None else result.speed.value


def _point(result: _Result, metric: str) -> Point:
    score, bounds = result.scores[metric], None if result.speed is None else result.speed.bounds
    tip = f"{result.name}: {METRIC_NAMES[metric]} {score.text()}, measured {_measured(result):.2f}x"
    if metric in result.kept:
        tip += f", keeps {result.kept[metric].text('{:.1%}')} of full depth"
    nominal = "" if result.nominal is None else f"{result.nominal:.2g}x"
    return Point(_measured(result), score.value, bounds, score.bounds, nominal, tip)


def _numbers(group: Sequence[_Result], metrics: Sequence[str]) -> Table:
    columns = {"run": "{name}", "nominal": "{nominal:.2f}x", "measured": "{speed}", "layers/token": "{layers:.1f}"}
    columns |= {METRIC_NAMES[m]: f"{{{m}}}" for m in metrics}
    columns |= {f"{METRIC_NAMES[m]} kept": f"{{{m} kept}}" for m in metrics if any(m in r.kept for r in group)}
    rows = [
        {"name": r.name, "nominal": r.nominal, "speed": r.speed and r.speed.text("{:.2f}x"), "layers": r.layers}
        | {m: _with_half(score) for m, score in r.scores.items()}
        | {f"{m} kept": share.text("{:.1%}") for m, share in r.kept.items()}
        for r in group
    ]
    return table("Scores with half the width of their 95% interval; nominal and measured speed-up", rows, columns)


def _with_half(score: _Bounded) -> str:
    low, high = score.bounds or (0.0, 0.0)
    return f"{score.value:.2f} ± {(high - low) / 2:.2f}"


def nominal_sections(sources: Sequence[Source]) -> list[Section]:
    """What nominal speed-ups of schedules came to in decoding time, for each set of records."""
    sections = []
    for group in _groups(sources):
        shown = [r for r in group if not r.full and r.nominal is not None and r.speed is not None]
        curves = {n: [_nominal_point(r) for r in rs] for n, rs in grouped(shown, lambda r: r.curve).items()}
        if curves:
            series = [Series(name, points) for name, points in curves.items()]
            figure = line_figure(Chart(series, "nominal speed-up", "measured speed-up", diagonal="nominal"))
            words = [f"{n}: " + ", ".join(f"{p.y:.2f}x at {p.x:.1f}x" for p in ps) for n, ps in curves.items()]
            label = f"Measured against nominal. {'; '.join(words)}"
            picture = Picture(figure, "What a nominal speed-up is worth in decoding time", label)
            sections.append(Section(f"Speed-up against nominal: {group[0].task}", _NOMINAL, pictures=[picture]))
    return sections


def _nominal_point(result: _Result) -> Point:
    nominal, speed = result.nominal or 0.0, result.speed or _Bounded(0.0)
    tip = f"{result.name}: {speed.text('{:.2f}')}x measured at {nominal:.2f}x nominal"
    return Point(nominal, speed.value, y_bounds=speed.bounds, tip=tip)


def quality_tiles(sources: Sequence[Source]) -> list[Tile]:
    """The fastest schedule that keeps 99% of full depth in every headline metric that it has."""
    found: list[tuple[float, float, _Result]] = []
    for group in _groups(sources):
        full = next((r for r in group if r.full), None)
        for r in group:
            shares = _shares(r, full)
            if not r.full and r.speed is not None and shares and min(shares) >= _WORTH:
                found.append((r.speed.value, min(shares), r))
    if not found:
        return []
    speed, share, result = max(found, key=lambda entry: entry[0])
    metrics = ", ".join(METRIC_NAMES[m] for m in _HEADLINE if m in result.scores)
    return [(f"{speed:.2f}x", f"measured with {result.name}, at {share:.1%} or more of full depth's {metrics}")]


def _shares(result: _Result, full: _Result | None) -> list[float]:
    if result.kept:
        return [result.kept[m].value for m in _HEADLINE if m in result.kept]
    if full is None:
        return []
    common = [m for m in _HEADLINE if m in result.scores and m in full.scores and full.scores[m].value]
    return [result.scores[m].value / full.scores[m].value for m in common]


def pair_sections(pairs: Sequence[Pair]) -> list[Section]:
    """Runs compared with the first of them."""
    head, *rows = pairs_cells(pairs)
    caption = "Run B against run A, metric by metric"
    return [Section("Paired differences", _PAIRED, tables=[Table(caption, head, rows)])] if rows else []
