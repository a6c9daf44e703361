"""Compares finished runs: their figures, and paired intervals of each against the first, as tables in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from skipdecode.common.bootstrap import Interval, Paired, compare
from skipdecode.common.tables import WIDTH, figures, markdown
from skipdecode.errors import DataError
from skipdecode.evaluation.metrics import FIDELITY, METRICS
from skipdecode.evaluation.results import Run
from skipdecode.evaluation.scores import IN_NATS, scorer_of

_NAME = 40
_AGREEMENT = [name for name in FIDELITY if name != "loss"]
_LOSS = "; loss: nats a token, less is better"


@dataclass(frozen=True)
class Pair:
    """One metric of two runs, named `a` and `b`; `comparison` is B against A."""

    a: str
    b: str
    metric: str
    comparison: Paired

    def to_dict(self) -> dict[str, Any]:
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
    pairs = []
    for other in runs[1:]:
        first = runs[0]
        if first.data["config"].get("data_sha256") != other.data["config"].get("data_sha256"):
            raise DataError(
                f"{first.path} and {other.path} are on different records: paired intervals need the same data"
            )
        common = [name for name in first.data["metrics"] if name in other.data["metrics"]]
        for metric in metrics or common:
            _check_signatures(first, other, metric)
            result = compare(
                first.table(metric), other.table(metric), scorer_of(metric), resamples=resamples, seed=seed
            )
            pairs.append(Pair(first.name, other.name, metric, result))
    return pairs


def _check_signatures(first: Run, other: Run, metric: str) -> None:
    for run in (first, other):
        if metric not in run.data["metrics"]:
            raise DataError(f"{run.path} has no {metric}: it has {', '.join(run.data['metrics'])}")
    one, two = (run.data["metrics"][metric]["signature"] for run in (first, other))
    if one != two:
        raise DataError(f"{metric} of {first.path} and {other.path} was scored differently: {one} and {two}")


def runs_tables(runs: Sequence[Run]) -> str:
    """Share of full depth's scores, scores, speed, agreement with full depth: tables with one row per run."""
    names = list(dict.fromkeys(name for run in runs for name in run.data["metrics"]))
    scores = [n for n in names if n not in _AGREEMENT]
    task = runs[0].data["config"].get("task", {}).get("name")
    on = f"{runs[0].data['n']} records" + (f" of task {task}" if task else "")
    engines = sorted({_engine(run) for run in runs} - {"-"})
    how = next((run.data["speed"] for run in runs if run.data.get("speed")), None)
    speed = "Speed-up over full depth [95% interval]" + (
        ", not measured"
        if how is None
        else f", {how['new_tokens']} new tokens for {how['records']} records on both sides, in turn, medians of "
        f"{how['rounds']} rounds{', engine ' + engines[0] if len(engines) == 1 else ''}; request: with "
        "prompt; layers/token: of these texts"
    )
    speeds = _SPEED | ({"engine": _engine} if len(engines) > 1 else {})
    tables: list[tuple[str, Mapping[str, Callable[[Run], str]]]] = [
        (f"Kept of full depth's score, % [95% interval]; {on}", {n: partial(_kept, n) for n in scores if n in METRICS}),
        (f"Scores ± half of their 95% interval{_LOSS * ('loss' in scores)}", {n: partial(_scored, n) for n in scores}),
        (speed, speeds),
        (
            "Agreement with full depth's outputs, % (kl: nats); copied: of the prompt's names and numbers, %",
            {n: partial(_scored, n) for n in names if n in _AGREEMENT},
        ),
    ]
    return "\n\n".join(text for title, columns in tables if (text := _table(title, runs, columns)))


def _table(title: str, runs: Sequence[Run], columns: Mapping[str, Callable[[Run], str]]) -> str:
    """A title, and below it the rows and columns that have values; empty if there are none."""
    lines = figures({"run": lambda run: _short(run.name), **columns}, runs)
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
    around = "" if bounds is None else f" [{by * bounds['low']:{form}}, {by * bounds['high']:{form}}]"
    return f"{by * value:{form}}{unit}{around}"


def _kept(name: str, run: Run) -> str:
    share = run.data["kept"].get(name)
    return "-" if share is None else _between(share["estimate"], share, ".1f", by=100)


def _scored(name: str, run: Run) -> str:
    if (entry := run.data["metrics"].get(name)) is None:
        return "-"
    half, digits = (entry["interval"]["high"] - entry["interval"]["low"]) / 2, 2 if name in IN_NATS else 1
    return f"{entry['score']:.{digits}f} ± {half:.{digits}f}"


def _gain(name: str, run: Run) -> str:
    value = run.data.get(name)
    return "-" if value is None else _between(value, run.data.get(f"{name}_interval"), unit="x")


def _tokens_per_s(run: Run) -> str:
    speed = run.data.get("speed")
    return "-" if not speed else f"{speed['new_tokens'] / speed['seconds']:.0f}"


def _engine(run: Run) -> str:
    """The engine of a run's speeds."""
    return "-" if run.data.get("decode_speedup") is None else str(run.data.get("engine", "-"))


_SPEED: dict[str, Callable[[Run], str]] = {
    "request": partial(_gain, "request_speedup"),
    "decoding": partial(_gain, "decode_speedup"),
    "nominal": partial(_gain, "nominal_speedup"),
    "tokens/s": _tokens_per_s,
    "layers/token": lambda run: "-" if run.layers_per_token is None else f"{run.layers_per_token:.2f}",
}


def _short(name: str) -> str:
    """A name cut in the middle: the speed-up is at its end."""
    return name if len(name) <= _NAME else f"{name[:9]}…{name[10 - _NAME :]}"
