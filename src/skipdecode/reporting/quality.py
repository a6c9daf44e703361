"""Quality against speed: a card for the first screen and a section for each group of results; paired differences."""

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
    "meteor": "METEOR",
    "cider": "CIDEr",
    "loss": "loss on references, nats a token (lower is better)",
    "kl": "KL from full depth, nats (lower is better)",
    "top1_agreement": "top-1 agreement with full depth, %",
    "token_agreement": "token agreement with full depth, %",
    "full_depth_agreement": "outputs that agree with full depth's, %",
}
_LEVELS = (0.99, 0.95, 0.9)
_FAR = 0.5  # share of full depth below which a result would squeeze all others together
_TRADE_OFF = (
    "Higher and further right is better; the dashed line is full depth. {what}, full depth's time over the method's. "
    "Bars are 95% intervals."
)
_NO_SPEED = "No speed was measured next to these scores."
_PAIRED = "The same resampled records score both runs of a pair; 95% intervals."


def best_first(groups: Iterable[Group]) -> list[Group]:
    """In the order of their answers: the most kept, by levels, then the fastest."""
    return sorted(groups, key=_rank, reverse=True)


def _rank(group: Group) -> tuple[float, float]:
    best = next(iter(_picks(group)), None)
    if best is None or best.least is None:
        return 0.0, 0.0
    share = best.least[1].value
    return next((level for level in _LEVELS if share >= level), share), group.pace(best)


def quality_card(group: Group) -> Card:
    """How much faster, at what loss: the fastest that keep 99%, 95% and 90% of full depth, or what keeps the most."""
    picks, note = _picks(group), group.machine
    what = "whole request" if group.by_request else "decoding"
    answers = [(f"{group.pace(r):.2f}x", what, [_beside(group, r), _keeps(r)]) for r in picks]
    if picks:
        note = ", ".join(filter(None, (picks[0].measured, note)))
    return Card(group.title, answers or [("–", "nothing here is faster than full depth", [])], note)


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


def _beside(group: Group, result: Result) -> str:
    """The method, and the speed-ups that are not the headline."""
    decoding = result.speed if group.by_request else None
    words = [] if decoding is None else [f"decoding {decoding.value:.2f}x"]
    words += [] if result.nominal is None else [f"nominal {_speed(result)}"]
    return result.name + (f": {', '.join(words)}" if words else "")


def _speed(result: Result) -> str:
    return "" if result.nominal is None else f"{result.nominal:.2g}x"


def _keeps(result: Result) -> str:
    if result.least is None:
        return "what it keeps is not known, as full depth has no scores here"
    metric, share = result.least
    others = [METRIC_NAMES[m] for m in HEADLINE if m in result.kept and m != metric]
    return f"keeps {percent(share)} of {METRIC_NAMES[metric]}" + (f", more of {' and '.join(others)}" if others else "")


def quality_section(group: Group) -> Section:
    """The trade-off of a group, a panel for each headline metric, and its numbers."""
    metrics = [m for m in METRIC_NAMES if any(m in r.scores for r in group.results)]
    compared = [r for r in group.results if not r.full and group.pace(r)]
    charts = [_trade_off(group, metric, compared) for metric in [m for m in metrics if m in HEADLINE] or metrics[:1]]
    charts = [chart for chart in charts if chart.series]
    if not charts:
        return Section(group.title, _NO_SPEED, tables=[_numbers(group, metrics)])
    what = "A whole request is prompt and decoding" if group.by_request else "Measured speed-up is of decoding alone"
    intro = _TRADE_OFF.format(what=what)
    label = f"Quality against the measured speed-up of {_what(group)}."
    for chart, metric in zip(charts, metrics, strict=False):
        best = max((r for r in compared if metric in r.scores), key=lambda r: r.scores[metric].value)
        label += f" {chart.ylabel}: the best is {best.name} with {best.scores[metric].value:.2f}"
        label += f" at {group.pace(best):.2f}x"
        label += f"; full depth {chart.level[0]:.2f}." if chart.level is not None else "."
    caption = "A line joins a method's speed-ups. Results below half of full depth are in the table alone."
    picture = Picture(partial(chart_figure, charts), caption, label)
    return Section(group.title, intro, pictures=[picture], tables=[_numbers(group, metrics)])


def _what(group: Group) -> str:
    return "whole requests" if group.by_request else "decoding"


def _trade_off(group: Group, metric: str, compared: Sequence[Result]) -> Chart:
    full = group.full.scores.get(metric) if group.full is not None else None
    series = [
        Series(curve, [_point(group, r, metric) for r in results])
        for curve, results in grouped((r for r in compared if metric in r.scores), lambda r: r.curve).items()
    ]
    level, least = None, None
    if full is not None:
        level = (full.value, *(full.bounds or (full.value, full.value)), "full depth")
        least = _FAR * full.value
    return Chart(series, f"speed-up of {_what(group)}", METRIC_NAMES[metric], level=level, least=least)


def _point(group: Group, result: Result, metric: str) -> Point:
    score, speed = result.scores[metric], result.request if group.by_request else result.speed
    return Point(group.pace(result), score.value, None if speed is None else speed.bounds, score.bounds)


def _numbers(group: Group, metrics: Sequence[str]) -> Table:
    kept = [m for m in METRIC_NAMES if any(m in r.kept for r in group.results)]
    head = [m for m in kept if m in HEADLINE]
    columns = {"run": "{name}"} | ({"kept, least": "{least}"} if kept else {})
    columns |= {f"{METRIC_NAMES[m]} kept": f"{{{m} kept}}" for m in head}
    columns |= {"model": "{model}"} if len({r.model for r in group.results}) > 1 else {}
    columns |= {"whole request": "{request}", "decoding": "{speed}", "nominal": "{nominal:.2f}x"}
    columns |= {"layers/token": "{layers:.1f}"} | {METRIC_NAMES[m]: f"{{{m}}}" for m in metrics}
    columns |= {f"{METRIC_NAMES[m]} kept": f"{{{m} kept}}" for m in kept if m not in head} | {"measured with": "{with}"}
    rows = [
        {"name": r.name, "model": r.model, "nominal": r.nominal, "layers": r.layers, "with": r.measured}
        | {"request": r.request and r.request.text(unit="x"), "speed": r.speed and r.speed.text(unit="x")}
        | {"least": f"{r.least[1].value:.1%}" if r.least else None}
        | {m: _with_half(score) for m, score in r.scores.items()}
        | {f"{m} kept": percent(share) for m, share in r.kept.items()}
        for r in group.results
    ]
    caption = "Kept: the share of full depth's score; brackets and ± are 95% intervals; speed-ups are over full depth"
    return table(caption, rows, columns, pinned=len(head) + 2 if kept else 1)


def _with_half(score: Bounded) -> str:
    low, high = score.bounds or (score.value, score.value)
    return f"{score.value:.2f} ± {(high - low) / 2:.2f}"


def pair_sections(pairs: Sequence[Pair], sources: Sequence[Source]) -> list[Section]:
    """Runs compared with the first of `sources`; where they are of several models, each with its own."""
    head, *rows = pairs_cells(pairs)
    first, *others = [(s.data.name, model_of(s.data)) for s in of_kind(sources, "evaluation")] or [("", "")]
    if {model for _, model in others} - {first[1]}:
        head = [*head, "model A", "model B"]
        models = [", ".join(dict.fromkeys(model for name, model in others if name == pair.b)) for pair in pairs]
        rows = [[*row, first[1], model] for row, model in zip(rows, models, strict=True)]
    caption = "Run B against run A, metric by metric"
    return [Section("Paired differences", _PAIRED, tables=[Table(caption, head, rows)])] if rows else []
