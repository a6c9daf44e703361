"""Quality against speed: a card and a section for each group of runs; paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from skipdecode.evaluation.compare import Pair, pairs_cells
from skipdecode.reporting.charts import Chart, Point, Series, chart_figure, grouped
from skipdecode.reporting.page import Card, Picture, Section, Table, table
from skipdecode.reporting.results import HEADLINE, Bounded, Group, Result, model_of, percent
from skipdecode.reporting.sources import Source, of_kind

__all__ = ["METRIC_NAMES", "best_first", "pair_sections", "quality_card", "quality_section"]

METRIC_NAMES = {
    "bleu": "BLEU",
    "rougeL": "ROUGE-L",
    "bertscore_f1": "BERTScore F",
    "chrf": "chrF",
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "loss": "loss on references, nats per token (lower is better)",
    "kl": "KL divergence from full depth, nats (lower is better)",
    "top1_agreement": "top-1 agreement with full depth, %",
    "token_agreement": "token agreement with full depth, %",
    "full_depth_agreement": "outputs equal to full depth's, %",
}
_LEVELS = (0.99, 0.95, 0.9)
_FAR = 0.5  # share of full depth's score; charts begin here, so that a failed result does not compress the others
_NUMBERS = "Kept: share of full depth's score. Brackets and ±: 95% intervals. Speed-ups are over full depth."


def best_first(groups: Iterable[Group]) -> list[Group]:
    """The groups by their best result: the level of quality kept, then the speed-up."""
    return sorted(groups, key=_rank, reverse=True)


def _rank(group: Group) -> tuple[float, float]:
    best = next(iter(_picks(group)), None)
    if best is None or best.least is None:
        return 0.0, 0.0
    share = best.least[1].value
    return next((level for level in _LEVELS if share >= level), share), group.pace(best)


def quality_card(group: Group) -> Card:
    """The fastest results that keep 99%, 95% and 90% of full depth's scores, else the one that keeps most."""
    picks, note = _picks(group), group.machine
    what = "whole request" if group.by_request else "decoding"
    answers = [(f"{group.pace(r):.2f}x", what, [_method(group, r), _keeps(r)]) for r in picks]
    if picks:
        note = ", ".join(filter(None, (picks[0].measured, note)))
    return Card(group.title, answers or [("–", "no result is faster than full depth", [])], note)


def _picks(group: Group) -> list[Result]:
    faster = [r for r in group.results if not r.full and group.pace(r) > 1]
    known = [(r.least[1].value, r) for r in faster if r.least is not None]
    if not known:
        return sorted(faster, key=group.pace)[-1:]
    picks: list[Result] = []
    for level in _LEVELS:
        enough = [(group.pace(r), share, r) for share, r in known if share >= level]
        pace, _, best = max(enough, key=lambda entry: entry[:2], default=(0.0, 0.0, None))
        if best is not None and not any(group.pace(other) >= pace for other in picks):
            picks.append(best)
    return picks or [max(known, key=lambda entry: entry[0])[1]]


def _method(group: Group, result: Result) -> str:
    """The method, with the speed-ups that the card does not show in large type."""
    decoding = result.speed if group.by_request else None
    words = [] if decoding is None else [f"decoding {decoding.value:.2f}x"]
    words += [] if result.nominal is None else [f"nominal {result.nominal:.2g}x"]
    return result.name + (f": {', '.join(words)}" if words else "")


def _keeps(result: Result) -> str:
    if result.least is None:
        return "quality kept is unknown: there is no run of full depth"
    metric, share = result.least
    others = [METRIC_NAMES[m] for m in HEADLINE if m in result.kept and m != metric]
    return f"keeps {percent(share)} of {METRIC_NAMES[metric]}" + (f", more of {' and '.join(others)}" if others else "")


def quality_section(group: Group) -> Section:
    """A chart of score against speed-up for each headline metric, and a table of all scores."""
    metrics = [m for m in METRIC_NAMES if any(m in r.scores for r in group.results)]
    compared = [r for r in group.results if not r.full and group.pace(r)]
    what = "whole requests" if group.by_request else "decoding"
    drawn = [m for m in metrics if m in HEADLINE] or metrics[:1]
    charts = [_trade_off(group, metric, compared, what) for metric in drawn]
    charts = [chart for chart in charts if chart.series]
    caption = (
        f"Score against the measured speed-up of {what}; higher and further right is better. Dashed: full depth. Bars: "
        f"95% intervals. Results below {_FAR:.0%} of full depth are only in the table."
    )
    pictures = [Picture(partial(chart_figure, charts), caption)] if charts else []
    return Section(group.title, pictures=pictures, tables=[_numbers(group, metrics)])


def _trade_off(group: Group, metric: str, compared: Sequence[Result], what: str) -> Chart:
    """The chart of a metric against the speed-up of `what`."""
    full = None if group.full is None else group.full.scores.get(metric)
    series = [
        Series(curve, [_point(group, r, metric) for r in results])
        for curve, results in grouped((r for r in compared if metric in r.scores), lambda r: r.curve).items()
    ]
    level, least = None, None
    if full is not None:
        level = (full.value, *(full.bounds or (full.value, full.value)), "full depth")
        least = _FAR * full.value
    return Chart(series, f"speed-up of {what}", METRIC_NAMES[metric], level=level, least=least)


def _point(group: Group, result: Result, metric: str) -> Point:
    score, speed = result.scores[metric], result.request if group.by_request else result.speed
    return Point(group.pace(result), score.value, None if speed is None else speed.bounds, score.bounds)


def _numbers(group: Group, metrics: Sequence[str]) -> Table:
    kept = [m for m in METRIC_NAMES if any(m in r.kept for r in group.results)]
    head = [m for m in kept if m in HEADLINE]
    columns = {"run": "{name}"} | ({"kept, least": "{least}"} if kept else {})
    columns |= {f"{METRIC_NAMES[m]} kept": f"{{{m} kept}}" for m in head}
    columns |= {"whole request": "{request}", "decoding": "{speed}", "nominal": "{nominal:.2f}x"}
    columns |= {"layers/token": "{layers:.1f}"} | {METRIC_NAMES[m]: f"{{{m}}}" for m in metrics}
    columns |= {f"{METRIC_NAMES[m]} kept": f"{{{m} kept}}" for m in kept if m not in head} | {"measured with": "{with}"}
    rows = [
        {"name": r.name, "nominal": r.nominal, "layers": r.run.layers_per_token, "with": r.measured}
        | {"request": r.request and r.request.text(unit="x"), "speed": r.speed and r.speed.text(unit="x")}
        | {"least": f"{r.least[1].value:.1%}" if r.least else None}
        | {m: _with_half(score) for m, score in r.scores.items()}
        | {f"{m} kept": percent(share) for m, share in r.kept.items()}
        for r in group.results
    ]
    return table(_NUMBERS, rows, columns, pinned=len(head) + 2 if kept else 1)


def _with_half(score: Bounded) -> str:
    low, high = score.bounds or (score.value, score.value)
    return f"{score.value:.2f} ± {(high - low) / 2:.2f}"


def pair_sections(pairs: Sequence[Pair], sources: Sequence[Source]) -> list[Section]:
    """A table of the runs compared with the first of `sources`; with model names if they differ."""
    head, *rows = pairs_cells(pairs)
    first, *others = [(s.data.name, model_of(s.data)) for s in of_kind(sources, "evaluation")] or [("", "")]
    if {model for _, model in others} - {first[1]}:
        head = [*head, "model A", "model B"]
        models = [", ".join(dict.fromkeys(model for name, model in others if name == pair.b)) for pair in pairs]
        rows = [[*row, first[1], model] for row, model in zip(rows, models, strict=True)]
    caption = "Run B against run A, metric by metric; 95% intervals from the same resampled records for both runs"
    return [Section("Paired differences", tables=[Table(caption, head, rows)])] if rows else []
