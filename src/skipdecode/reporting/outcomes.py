"""Quality against speed, whether it comes from a run of `skipdecode eval` or from a published table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.evaluation.results import Run
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import curve_name

__all__ = ["HEADLINE", "METRIC_NAMES", "Bounded", "Outcome", "by_data", "outcomes_of"]

HEADLINE = ("bleu", "rougeL", "bertscore_f1")
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
    "exact_match": "outputs equal to full depth's, %",
}


@dataclass(frozen=True)
class Bounded:
    """A value with its bounds, where they are known."""

    value: float
    bounds: tuple[float, float] | None = None

    def text(self, pattern: str = "{:.2f}") -> str:
        """``value [low, high]``."""
        if self.bounds is None:
            return pattern.format(self.value)
        return f"{pattern.format(self.value)} [{', '.join(pattern.format(b) for b in self.bounds)}]"


@dataclass(frozen=True)
class Outcome:
    """What one method came to on one set of records.

    Parameters
    ----------
    data : str
        Which records: outcomes are drawn together only if it is the same.
    task : str
        Name of the task, for headings.
    name, curve : str
        Of the run, and without its speed-up.
    full : bool
        Every layer ran.
    nominal : float, optional
    speed : Bounded, optional
        Measured speed-up in decoding.
    layers : float, optional
        Mean layers a generated token ran.
    scores, kept : mapping of str to Bounded
        By metric; `kept` is the share of tuned full depth's score.
    """

    data: str
    task: str
    name: str
    curve: str
    full: bool
    nominal: float | None
    speed: Bounded | None
    layers: float | None
    scores: Mapping[str, Bounded]
    kept: Mapping[str, Bounded]


def outcomes_of(sources: Sequence[Source]) -> list[Outcome]:
    """Of all runs and tables: full depth first, then curve by curve. A run that stands in a table counts once."""
    rows = [(s.data, row) for s in of_kind(sources, "quality") for row in s.data["runs"]]
    runs: list[Run] = [source.data for source in of_kind(sources, "eval")]
    tabled = [_row_identity(table, row) for table, row in rows]
    found = [_of_run(run) for run in runs if _run_identity(run) not in tabled]
    found += [_of_row(table, row) for table, row in rows]
    return sorted(found, key=lambda o: (not o.full, o.curve, o.nominal or 0.0))


def by_data(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Groups of outcomes on the same records."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.data, []).append(outcome)
    return list(groups.values())


def _run_identity(run: Run) -> tuple[Any, ...]:
    """What a run and its row in a table have in common, and no other: records, decoding, scores."""
    data, config = run.data, run.data["config"]
    scores = {name: entry["score"] for name, entry in data["metrics"].items()}
    return config.get("data_sha256"), data["n"], config.get("method"), scores


def _row_identity(table: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[Any, ...]:
    scores = {name: row[name] for name in row["intervals"]}
    return table.get("task", {}).get("data_sha256"), row["n"], row.get("decoding"), scores


def _of_run(run: Run) -> Outcome:
    data = run.data
    speed, config = data.get("measured_speedup_interval"), data["config"]
    return Outcome(
        data=f"{config.get('data_sha256')}, {data['n']}",
        task=f"{config.get('task', {}).get('name', '')}, {data['n']} records",
        name=run.name,
        curve=curve_name(run.name),
        full=config.get("method", {}).get("name") == "full",
        nominal=data.get("nominal_speedup"),
        speed=None
        if run.measured_speedup is None
        else Bounded(run.measured_speedup, None if speed is None else (speed["low"], speed["high"])),
        layers=(data.get("speed") or {}).get("layers_per_token"),
        scores={
            name: Bounded(entry["score"], (entry["interval"]["low"], entry["interval"]["high"]))
            for name, entry in data["metrics"].items()
        },
        kept={},
    )


def _of_row(table: Mapping[str, Any], row: Mapping[str, Any]) -> Outcome:
    task, nominal, speed = table.get("task", {}), row.get("nominal_speedup"), row.get("measured_speedup")
    bounds = row.get("measured_speedup_interval")
    return Outcome(
        data=f"{task.get('data_sha256')}, {row['n']}",
        task=f"{task.get('name', '')}, {row['n']} records",
        name=row["method"] + ("" if nominal is None else f" {nominal:.2g}x"),
        curve=row["method"],
        full=row["method"] == "full",
        nominal=nominal,
        speed=None if speed is None else Bounded(speed, None if bounds is None else (bounds[0], bounds[1])),
        layers=row.get("mean_layers"),
        scores={name: Bounded(row[name], (low, high)) for name, (low, high) in row["intervals"].items()},
        kept={
            name: Bounded(share["share"], (share["low"], share["high"]))
            for name, share in row["retained"].items()
            if share is not None
        },
    )
