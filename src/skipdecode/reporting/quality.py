"""Sections on quality: the trade-off curve, the runs in numbers, paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipdecode.evaluation.compare import Pair
from skipdecode.evaluation.fidelity import IN_NATS
from skipdecode.evaluation.tables import pairs_cells
from skipdecode.reporting.outcomes import HEADLINE, METRIC_NAMES, Outcome, by_data, outcomes_of
from skipdecode.reporting.page import Picture, Section, Table, Tile
from skipdecode.reporting.plots import Point, Series, line_figure
from skipdecode.reporting.sources import Source

__all__ = ["pairs_section", "quality_sections", "quality_tile"]

_WORTH = 0.99
_INTRO = (
    "Higher and further right is better. Measured speed-up is full depth's time over the method's for the same "
    "decoding work on the same batches, in turn; the small numbers are nominal speed-ups, which count layers. Bars "
    "are 95% bootstrap intervals. The dashed line is full depth."
)


def quality_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each set of records."""
    return [_section(group) for group in by_data(outcomes_of(sources))]


def _section(group: Sequence[Outcome]) -> Section:
    metrics = [m for m in METRIC_NAMES if any(m in o.scores for o in group)]
    drawn = [picture for picture in (_tradeoff(group, metric) for metric in metrics) if picture is not None]
    shown = sum(metric in HEADLINE for metric in metrics) or 1
    return Section(
        f"Quality against measured speed-up: {group[0].task}",
        _INTRO if drawn else "No speed was measured next to these scores.",
        pictures=drawn[:shown],
        more=drawn[shown:],
        tables=[_numbers(group, metrics)],
    )


def _tradeoff(group: Sequence[Outcome], metric: str) -> Picture | None:
    shown = [o for o in group if metric in o.scores and o.speed is not None]
    name = METRIC_NAMES[metric]
    full = next((o.scores[metric] for o in group if o.full and metric in o.scores), None)
    curves: dict[str, list[Point]] = {}
    for o in shown:
        if not o.full:
            curves.setdefault(o.curve, []).append(_point(o, metric))
    if not curves and full is None:
        return None
    series = [Series(curve, tuple(points)) for curve, points in curves.items()]
    if full is not None:
        series.append(Series("" if series else "full depth", (Point(1.0, full.value, y_bounds=full.bounds),), color=-1))
    level = None if full is None else (full.value, *(full.bounds or (full.value, full.value)), "full depth")
    better = min if metric in IN_NATS else max
    best = better((o for o in shown if not o.full), key=lambda o: o.scores[metric].value, default=None)
    label = f"{name} against measured speed-up."
    if full is not None:
        label += f" Full depth: {full.value:.2f}."
    if best is not None and best.speed is not None:
        score = best.scores[metric].value
        label += f" The best of the others is {best.name} with {score:.2f} at {best.speed.value:.2f}x."
    figure = line_figure(series, "measured speed-up over full depth (decoding)", name, level=level)
    return Picture(figure, label, label)


def _point(outcome: Outcome, metric: str) -> Point:
    speed, score = outcome.speed, outcome.scores[metric]
    where = 0.0 if speed is None else speed.value
    tip = f"{outcome.name}: {METRIC_NAMES[metric]} {score.text()}, measured {where:.2f}x"
    if metric in outcome.kept:
        tip += f", keeps {outcome.kept[metric].text('{:.1%}')} of full depth"
    nominal = "" if outcome.nominal is None else f"{outcome.nominal:.2g}x"
    return Point(where, score.value, None if speed is None else speed.bounds, score.bounds, nominal, tip)


def _numbers(group: Sequence[Outcome], metrics: Sequence[str]) -> Table:
    keeps = [m for m in metrics if any(m in o.kept for o in group)]
    head = ["run", "nominal", "measured", "layers/token"]
    head += [METRIC_NAMES[m] for m in metrics] + [f"{METRIC_NAMES[m]} kept" for m in keeps]
    rows = [
        [
            o.name,
            "–" if o.nominal is None else f"{o.nominal:.2f}x",
            "–" if o.speed is None else o.speed.text("{:.2f}x"),
            "–" if o.layers is None else f"{o.layers:.1f}",
            *(_score(o, m) for m in metrics),
            *(o.kept[m].text("{:.1%}") if m in o.kept else "–" for m in keeps),
        ]
        for o in group
    ]
    return Table("Scores with half the width of their 95% interval; nominal and measured speed-up", head, rows)


def _score(outcome: Outcome, metric: str) -> str:
    score = outcome.scores.get(metric)
    if score is None:
        return "–"
    half = 0.0 if score.bounds is None else (score.bounds[1] - score.bounds[0]) / 2
    return f"{score.value:.2f} ± {half:.2f}"


def quality_tile(sources: Sequence[Source]) -> list[Tile]:
    """The fastest schedule that keeps 99% of full depth in every headline metric that it has."""
    found: list[tuple[float, float, Outcome]] = []
    for group in by_data(outcomes_of(sources)):
        full = next((o for o in group if o.full), None)
        for o in group:
            shares = _shares(o, full)
            if not o.full and o.speed is not None and shares and min(shares) >= _WORTH:
                found.append((o.speed.value, min(shares), o))
    if not found:
        return []
    speed, share, outcome = max(found, key=lambda entry: entry[0])
    metrics = ", ".join(METRIC_NAMES[m] for m in HEADLINE if m in outcome.scores)
    return [Tile(f"{speed:.2f}x", f"measured with {outcome.name}, at {share:.1%} or more of full depth's {metrics}")]


def _shares(outcome: Outcome, full: Outcome | None) -> list[float]:
    if outcome.kept:
        return [outcome.kept[m].value for m in HEADLINE if m in outcome.kept]
    common: list[Any] = [] if full is None else [m for m in HEADLINE if m in outcome.scores and m in full.scores]
    return [outcome.scores[m].value / full.scores[m].value for m in common if full and full.scores[m].value]


def pairs_section(pairs: Sequence[Pair]) -> Section:
    """Runs compared with the first of them."""
    if not pairs:
        return Section("Paired differences")
    head, *rows = pairs_cells(pairs)
    table = Table("Run B against run A, metric by metric", head, rows)
    note = "The same resampled records score both runs of a pair; 95% intervals."
    return Section("Paired differences", note, tables=[table])
