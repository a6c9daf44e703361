"""Compares finished runs: their figures, and paired intervals of each against the first, as tables in Markdown.

Also the scores that schedules keep: rows of evaluations, and the fastest that keeps a share.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from typing import Any

from skipdecode.common.bootstrap import Interval, Paired, compare
from skipdecode.common.jsonl import Json
from skipdecode.common.tables import WIDTH, figures, markdown
from skipdecode.errors import DataError
from skipdecode.evaluation.metrics import FIDELITY, METRICS, NEAR_ZERO
from skipdecode.evaluation.results import Run
from skipdecode.evaluation.scores import IN_NATS, scorer_of
from skipdecode.generation.speed import HOW

_NAME = 40
_AGREEMENT = [name for name in FIDELITY if name != "loss"]
_LOSS = "; loss: nats a token, less is better"
Row = Mapping[str, Any]
Columns = dict[str, str | Callable[[Any], str]]


@dataclass(frozen=True)
class Pair:
    """One metric of two runs, named `a` and `b`; `comparison` is B against A."""

    a: str
    b: str
    metric: str
    comparison: Paired

    def to_dict(self) -> Json:
        """JSON-ready: the runs' names, the metric, and the fields of `Paired`, whose `a` and `b` are the two scores."""
        return {"runs": [self.a, self.b], "metric": self.metric, **asdict(self.comparison)}


def compare_runs(
    runs: Sequence[Run], metrics: Sequence[str] = (), *, resamples: int = 1000, seed: int = 0
) -> list[Pair]:
    """Every run against the first, in `metrics`, which all runs must have, or else in each metric that both have.

    Raises DataError: the runs are on different records, were scored with different settings, or lack one of `metrics`;
    UsageError: the metric is not known.
    """
    for name in metrics:
        scorer_of(name)
    first, pairs = runs[0], []
    for other in runs[1:]:
        if first.data["config"].get("data_sha256") != other.data["config"].get("data_sha256"):
            raise DataError(
                f"{first.path} and {other.path} are on different records: paired intervals need the same data"
            )
        common = [name for name in first.data["metrics"] if name in other.data["metrics"]]
        for metric in metrics or common:
            for run in (first, other):
                if metric not in run.data["metrics"]:
                    raise DataError(f"{run.path} has no {metric}: it has {', '.join(run.data['metrics'])}")
            signatures = [run.data["metrics"][metric]["signature"] for run in (first, other)]
            if signatures[0] != signatures[1]:
                paths = f"{first.path} and {other.path}"
                raise DataError(f"{metric} of {paths} was scored differently: {signatures[0]} and {signatures[1]}")
            tables = first.table(metric), other.table(metric)
            result = compare(*tables, scorer_of(metric), resamples=resamples, seed=seed)
            pairs.append(Pair(first.name, other.name, metric, result))
    return pairs


def runs_tables(runs: Sequence[Run]) -> str:
    """Share of full depth's scores, scores, speed, agreement with full depth: tables with one row per run."""
    rows = [run.data for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    scores = [n for n in names if n not in _AGREEMENT]
    task = rows[0]["config"].get("task", {}).get("name")
    on = f"{rows[0]['n']} records" + (f" of task {task}" if task else "")
    engines = sorted({_engine(row) for row in rows} - {"-"})
    measurement = next((row["speed"] for row in rows if row.get("speed")), None)
    conditions = ", not measured" if measurement is None else _conditions(measurement, engines)
    speed = f"Speed-up over full depth [95% interval]{conditions}"
    speeds = _SPEED | ({"engine": _engine} if len(engines) > 1 else {})
    tables: list[tuple[str, Columns]] = [
        (f"Kept of full depth's score, % [95% interval]; {on}", {n: partial(_kept, n) for n in scores if n in METRICS}),
        (f"Scores ± half of their 95% interval{_LOSS * ('loss' in scores)}", {n: partial(_scored, n) for n in scores}),
        (speed, speeds),
        (
            "Agreement with full depth's outputs, % (kl: nats); copied: of the prompt's names and numbers, %",
            {n: partial(_scored, n) for n in names if n in _AGREEMENT},
        ),
    ]
    return "\n\n".join(text for title, columns in tables if (text := _table(title, rows, columns)))


def _conditions(speed: Mapping[str, Any], engines: Sequence[str]) -> str:
    """The conditions of a measurement in words, for the caption of its table."""
    engine = f", engine {engines[0]}" if len(engines) == 1 else ""
    order = f", {HOW}" if HOW in speed.get("what", "") else ", in turn, medians of rounds"
    return (
        f", {speed['new_tokens']} new tokens for {speed['records']} records on both sides, in batches of "
        f"{speed['batch_size']}, {speed['rounds']} rounds{engine}{order}; request: with prompt; one request: not in a "
        "batch; layers/token: of the outputs"
    )


def _table(title: str, rows: Sequence[Row], columns: Columns) -> str:
    """A title, and below it the rows and columns that have values; empty if there are none."""
    lines = figures({"run": lambda row: _short(row["name"]), **columns}, rows)
    return "\n".join([*textwrap.wrap(title, WIDTH), *lines]) if lines else ""


def pairs_table(pairs: Sequence[Pair]) -> str:
    """One row per comparison, below the name of the run that all others are compared with."""
    rows = [["metric", "run B", "A", "B", "B - A", "B / A"]]
    for pair in pairs:
        c = pair.comparison
        scores = f"{c.a:.2f}", f"{c.b:.2f}"
        rows.append([pair.metric, _short(pair.b), *scores, _bounds(c.difference, "+"), _bounds(c.ratio)])
    return "\n".join([f"Against A, {pairs[0].a} [paired 95% interval]", *markdown(rows)])


def _bounds(interval: Interval | None, sign: str = "") -> str:
    return "-" if interval is None else _between(interval.estimate, vars(interval), f"{sign}.2f")


def _between(value: float, bounds: Mapping[str, float] | None, form: str = ".2f", unit: str = "", by: int = 1) -> str:
    if bounds is None or bounds["low"] == bounds["high"]:  # as of the only record, which says nothing of others
        return f"{by * value:{form}}{unit}"
    around = f" [{by * bounds['low']:{form}}, {by * bounds['high']:{form}}]"
    return f"{by * value:{form}}{unit}{around}"


def _kept(name: str, run: Row) -> str:
    share = run["kept"][name]
    return _between(share["estimate"], share, ".1f", by=100)


def _scored(name: str, run: Row) -> str:
    entry = run["metrics"][name]
    half, digits = _half_width(entry), 2 if name in IN_NATS else 1
    return f"{entry['score']:.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")


def _half_width(entry: Mapping[str, Any]) -> float:
    """Half of the width of a score's interval; 0 where none is known."""
    interval = entry.get("interval") or {"low": 0.0, "high": 0.0}
    return float(interval["high"] - interval["low"]) / 2


def _gain(name: str, run: Row) -> str:
    return _between(run[name], run.get(f"{name}_interval"), unit="x")


def _engine(run: Row) -> str:
    """The engine of a run's speeds."""
    return "-" if run.get("decode_speedup") is None else str(run.get("engine", "-"))


_SPEED: Columns = {
    "request": partial(_gain, "request_speedup"),
    "one request": partial(_gain, "request_speedup_alone"),
    "decoding": partial(_gain, "decode_speedup"),
    "nominal": "{nominal_speedup:.2f}x",
    "tokens/s": lambda run: f"{run['speed']['new_tokens'] / run['speed']['seconds']:.0f}",
    "layers/token": "{free_running[layers_per_token]:.2f}",
}


def _short(name: str) -> str:
    """A name cut in the middle: the speed-up is at its end."""
    return name if len(name) <= _NAME else f"{name[:9]}…{name[10 - _NAME :]}"


_NOISE = 1.05  # of speed-ups
_CLEAR = 5  # of 100: a few words decide scores below
_PRECISE = 0.25  # of a score: half the width of its interval, above which other records would say something else
PERPLEXITY = "1 / perplexity"
_FULL_DEPTH = ("base", "full")
_SHOWN_NAMES = {"bleu": "BLEU", "chrf": "chrF", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}


def rows_of(document: Mapping[str, Any]) -> list[Json]:
    """A row for each schedule in the JSON output of `skipdecode eval`: name, speed-ups, scores (higher is better)."""
    if "runs" in document:
        return [_speeds(run) | _task_scores(run) | {"records": run.get("n")} for run in document["runs"]]
    return [_speeds(row) | _self_scores(row) | {"records": document.get("n")} for row in document["rows"]]


def _speeds(document: Row) -> Json:
    full = document["name"] in _FULL_DEPTH  # a schedule that shortens prompts alone has a nominal speed-up of 1 too
    request, decode = (1.0 if full else document.get(name) for name in ("request_speedup", "decode_speedup"))
    method = document.get("config", {}).get("method", document)
    more = {"quantization": method["quantization"]} if "quantization" in method else {}
    more |= {
        name: document.get(name) for name in ("nominal_speedup", "request_speedup_interval", "request_speedup_alone")
    }
    return {"name": document["name"], "full_depth": full, "request_speedup": request, "decode_speedup": decode} | more


def _task_scores(run: Row) -> Json:
    metrics = run["metrics"]
    entries = {name: entry for name, entry in metrics.items() if name in METRICS}
    return {
        "copied": metrics.get("copied", {}).get("score"),
        "scores": {name: entry["score"] for name, entry in entries.items()},
        "imprecise": [name for name, entry in entries.items() if _half_width(entry) > _PRECISE * entry["score"]],
        "shares": run.get("kept", {}),
    }


def _self_scores(document: Row) -> Json:
    worse = document["of_base"]
    ratio = worse["estimate"]
    share = {"estimate": 1 / ratio, "low": 1 / worse["high"], "high": 1 / worse["low"]}
    return {"perplexity_ratio": ratio, "scores": {PERPLEXITY: 100 / ratio}, "shares": {PERPLEXITY: share}}


def with_kept(rows: Sequence[Row]) -> list[Json]:
    """The rows with the share of full depth's scores that each keeps: the smallest over all scores.

    If there are several rows of full depth, a score is compared with the best of them. Scores below 5 of 100 at full
    depth do not count; without any other, `kept` is None. Nor do scores with an interval wider than half of them there,
    beside others: they are `not_counted`. `kept_interval` is the 95% interval of `kept`, if it is known: if the score
    is compared with full depth of the same evaluation, which `shares` are about.
    """
    clear = {name: score for name, score in best_scores(rows).items() if score >= _CLEAR}
    imprecise = {name for row in rows if row["full_depth"] for name in row.get("imprecise", ())}
    counted = {name: score for name, score in clear.items() if name not in imprecise} or clear
    more = {"not_counted": [name for name in clear if name not in counted]}
    return [{**row} | more | _least_share(row, counted) for row in rows]


def best_scores(rows: Sequence[Row]) -> dict[str, float]:
    """The best score of full depth for each metric."""
    full = [row["scores"] for row in rows if row["full_depth"]]
    return {name: max(scores.get(name, 0.0) for scores in full) for name in full[0]}


def near_zero(rows: Sequence[Row]) -> str:
    """The first score of full depth that is near zero, such as "BLEU 2.2 of 100"; empty if none is."""
    for name, score in best_scores(rows).items():
        if score < NEAR_ZERO:
            return f"{shown_name(name)} {score:.1f} of 100"
    return ""


def shown_name(score: str) -> str:
    """The name of a score in sentences."""
    return _SHOWN_NAMES.get(score, score)


def _least_share(row: Row, best: Mapping[str, float]) -> Json:
    """The smallest share of the best scores, with its interval."""
    if not best:
        return {"kept": None, "kept_interval": None}
    shares = {name: row["scores"][name] / score for name, score in best.items()}
    name, kept = min(shares.items(), key=lambda entry: entry[1])
    share = row.get("shares", {}).get(name)
    known = share is not None and not row["full_depth"] and math.isclose(share["estimate"], kept, rel_tol=1e-6)
    return {"kept": kept, "kept_interval": {"low": share["low"], "high": share["high"]} if known else None}


def fastest_that_keeps(rows: Sequence[Row], share: float, speed: str = "request_speedup") -> Row | None:
    """The row with the largest speed-up above 1 that keeps a share; None if there is none.

    `speed` is "request_speedup", of batches, or "request_speedup_alone", of one request at a time.
    """
    keeping = [row for row, kept in measured(rows) if kept >= share and (row[speed] or 0) > 1]
    return max(keeping, key=lambda row: row[speed], default=None)


def impossible(rows: Sequence[Row]) -> Iterator[str]:
    """Warn if a schedule with fewer layers was measured clearly slower: the machine was busy."""
    for (deep, _), (fast, _) in permutations(measured(rows), 2):
        alike = all(deep.get(name) == fast.get(name) for name in ("minutes", "quantization"))
        speeds = fast["request_speedup"], deep["request_speedup"]
        if alike and fast["nominal_speedup"] > deep["nominal_speedup"] and _NOISE * speeds[0] < speeds[1]:
            less = f"{row_name(fast)}, with fewer layers than {row_name(deep)}, was measured {speeds[0]:.2f}x"
            yield f"{less} against {speeds[1]:.2f}x: other work disturbed the measurement, repeat it"


def kept_columns(rows: Sequence[Row]) -> Columns:
    """Columns of a table of the rows, with their formats; of texts of the model its perplexity, before and after."""
    scores = {score: f"{{scores[{score}]:.1f}}" for score in rows[0]["scores"]}
    if PERPLEXITY in scores:
        scores = {"perplexity against before": "{perplexity_ratio:.2f} times"}
    return {
        "schedule": row_name,
        "request": "{request_speedup:.2f}x",
        "request, interval": "{request_speedup_interval[low]:.2f} to {request_speedup_interval[high]:.2f}",
        "one request": "{request_speedup_alone:.2f}x",
        "decode": "{decode_speedup:.2f}x",
        "kept": "{kept:.1%}",
        "95% interval": "{kept_interval[low]:.1%} to {kept_interval[high]:.1%}",
        "copied": "{copied:.1f}%",
        "invented names": "{names_copied:.0%}",
        **scores,
    }


def row_name(row: Row) -> str:
    """The name of a row, which a schedule of the tuned and of the untuned model share, made distinct."""
    minutes = row.get("minutes")
    return f"{row['name']}, after {minutes:g} min" if minutes else str(row["name"])


def measured(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """The schedules whose speed-up and kept share are known, with the share."""
    for row in rows:
        if row["request_speedup"] is not None and row["kept"] is not None and not row["full_depth"]:
            yield row, row["kept"]
