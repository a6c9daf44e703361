"""Runs of `skipdecode eval` in groups that share a chart: same task, model, records and scoring settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skipdecode.evaluation.metrics import METRICS
from skipdecode.evaluation.results import Run
from skipdecode.reporting.sources import Source, of_kind
from skipdecode.schedule import Schedule

__all__ = ["HEADLINE", "Bounded", "Group", "Result", "groups_of", "model_of", "percent"]

HEADLINE = ("bleu", "rougeL", "bertscore_f1")


@dataclass(frozen=True)
class Bounded:
    """A value with the bounds of its 95% interval, if they are known."""

    value: float
    bounds: tuple[float, float] | None = None

    def text(self, pattern: str = "{:.2f}", unit: str = "") -> str:
        """``value [low, high]``, with the unit after the value."""
        value = pattern.format(self.value) + unit
        if self.bounds is None:
            return value
        # The bounds stay on one line.
        low, high = (pattern.format(bound) for bound in self.bounds)
        return f"{value} [{low},\N{NO-BREAK SPACE}{high}]"


def percent(share: Bounded) -> str:
    """A share as ``value% [low, high]``."""
    bounds = share.bounds and (100 * share.bounds[0], 100 * share.bounds[1])
    return Bounded(100 * share.value, bounds).text("{:.1f}", "%")


@dataclass(frozen=True)
class Result:
    """What the report shows of a run.

    Parameters
    ----------
    curve : str
        The name without its nominal speed-up; results of one curve are joined by a line.
    request, speed : Bounded or None
        Measured speed-up of whole requests, and of decoding alone.
    kept : mapping of str to Bounded
        For each metric, the share of full depth's score.
    measured : str
        Engine, batch size, dtype and threads of the speed measurement.
    """

    run: Run
    curve: str
    request: Bounded | None
    speed: Bounded | None
    scores: Mapping[str, Bounded]
    kept: Mapping[str, Bounded]
    measured: str

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run.name

    @property
    def full(self) -> bool:
        """Whether the run is full depth."""
        return self.run.full_depth

    @property
    def nominal(self) -> float | None:
        """The nominal speed-up, if the method has a schedule."""
        return self.run.data.get("nominal_speedup")

    @property
    def least(self) -> tuple[str, Bounded] | None:
        """The metric with the smallest kept share; one of the headline metrics if the run has any."""
        shares = {m: self.kept[m] for m in HEADLINE if m in self.kept} or self.kept
        return min(shares.items(), key=lambda entry: entry[1].value, default=None)


@dataclass(frozen=True)
class Group:
    """Results that may be compared: full depth first, then by curve and speed-up."""

    title: str
    machine: str
    results: list[Result]

    @property
    def runs(self) -> list[Run]:
        """The runs of the results."""
        return [result.run for result in self.results]

    @property
    def full(self) -> Result | None:
        """The result of full depth."""
        return next((r for r in self.results if r.full), None)

    def pace(self, result: Result) -> float:
        """The speed-up to compare by: of whole requests if all results have it, else of decoding; 0 if unknown."""
        found = result.request if self.by_request else result.speed
        return 0.0 if found is None else found.value

    @property
    def by_request(self) -> bool:
        """Whether each result with a speed-up has one of whole requests."""
        return all(r.request is not None for r in self.results if r.speed is not None)


def groups_of(sources: Sequence[Source]) -> list[Group]:
    """The groups of all evaluation runs among the sources, in the order of their first runs."""
    found: dict[Any, list[Run]] = {}
    for source in of_kind(sources, "evaluation"):
        run = source.data
        signatures = sorted((m, entry["signature"]) for m, entry in run.data["metrics"].items() if m in METRICS)
        config = run.data["config"]
        key = config.get("data_sha256"), run.data["n"], config.get("model"), tuple(signatures)
        found.setdefault(key, []).append(run)
    return [_group(runs) for runs in found.values()]


def model_of(run: Run) -> str:
    """The name of the checkpoint."""
    return Path(str(run.data["config"].get("model"))).name


def _group(runs: Sequence[Run]) -> Group:
    data, results = runs[0].data, [_result(run) for run in runs]
    full = next((r for r in results if r.full), None)
    title = f"{data['config'].get('task', {}).get('name', '')} on {model_of(runs[0])}: {data['n']} records"
    results = [_with_kept(r, full) for r in results]
    ordered = sorted(results, key=lambda r: (not r.full, r.curve, r.nominal or 0.0))
    return Group(title, data["environment"].get("cpu", ""), ordered)


def _with_kept(result: Result, full: Result | None) -> Result:
    """The result with the shares that it keeps; without intervals if only the two scores are known."""
    if full is None or result.kept:
        return result
    common = [m for m in result.scores if m in METRICS and m in full.scores and full.scores[m].value]
    return replace(result, kept={m: Bounded(result.scores[m].value / full.scores[m].value) for m in common})


def _result(run: Run) -> Result:
    data, config = run.data, run.data["config"]
    threads = data["environment"].get("threads")
    measured = {
        "{} engine": data.get("engine"),
        "batch {}": config.get("settings", {}).get("batch_size"),
        "{}": config.get("dtype"),
        "{} weights": config.get("quantization"),
        "1 thread" if threads == 1 else "{} threads": threads,
    }
    return Result(
        run,
        curve=_curve(run),
        request=_bounded(data, "measured_speedup_with_prompt"),
        speed=_bounded(data, "measured_speedup"),
        scores={m: Bounded(e["score"], _bounds(e["interval"])) for m, e in data["metrics"].items()},
        kept={m: Bounded(e["estimate"], _bounds(e)) for m, e in data["kept"].items() if e and m in METRICS},
        measured=", ".join(text.format(value) for text, value in measured.items() if value not in (None, "none")),
    )


def _curve(run: Run) -> str:
    """The curve of the run's schedule if both have the same name, else the run's name."""
    found = run.data["config"].get("method", {}).get("schedule")
    schedule = None if found is None else Schedule.from_dict(found)
    return schedule.curve if schedule is not None and schedule.name == run.name else run.name


def _bounded(data: Mapping[str, Any], name: str) -> Bounded | None:
    value, interval = data.get(name), data.get(f"{name}_interval")
    return None if value is None else Bounded(value, None if interval is None else _bounds(interval))


def _bounds(interval: Mapping[str, float]) -> tuple[float, float]:
    return interval["low"], interval["high"]
