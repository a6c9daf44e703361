"""What methods came to on a task: runs of `skipdecode eval` and rows of published tables, in groups that share a chart.

A group has one task, one model and one yardstick: the same records, scored the same way, shares kept of one model at
full depth. Nothing is drawn or listed together that is not in one group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """A value with the bounds of its 95% interval, where they are known."""

    value: float
    bounds: tuple[float, float] | None = None

    def text(self, pattern: str = "{:.2f}", unit: str = "") -> str:
        """``value [low, high]``, the unit after the value."""
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
    """One method on one set of records.

    Parameters
    ----------
    name, curve : str
        What it is called, with and without its nominal speed-up.
    model : str
        The checkpoint.
    request, speed : Bounded or None
        Measured speed-up of whole requests, and of decoding alone.
    layers : float or None
        Mean of a generated token.
    kept : mapping of str to Bounded
        By metric, the share of the yardstick's score.
    measured : str
        With what the speed was measured.
    run : Run or None
        The run itself, where it is at hand.
    """

    name: str
    curve: str
    model: str
    full: bool
    decoding: Mapping[str, Any] | None
    nominal: float | None
    request: Bounded | None
    speed: Bounded | None
    layers: float | None
    scores: Mapping[str, Bounded]
    kept: Mapping[str, Bounded]
    measured: str
    run: Run | None = None

    @property
    def least(self) -> tuple[str, Bounded] | None:
        """The metric of which least is kept, of the headline ones where it has any."""
        shares = {m: self.kept[m] for m in HEADLINE if m in self.kept} or self.kept
        return min(shares.items(), key=lambda entry: entry[1].value, default=None)


@dataclass(frozen=True)
class Group:
    """Results that may stand side by side, full depth first, then curve by curve."""

    task: str
    model: str
    records: int
    yardstick: str
    machine: str
    results: list[Result] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Task, model and yardstick, in words."""
        against = f" against {self.yardstick}" if self.yardstick not in ("", self.model) else ""
        return f"{self.task} on {self.model}: {self.records} records{against}"

    @property
    def runs(self) -> list[Run]:
        """The runs that are at hand."""
        return [result.run for result in self.results if result.run is not None]

    @property
    def full(self) -> Result | None:
        """The yardstick's own result."""
        return next((r for r in self.results if r.full and r.model == self.yardstick), None)

    def pace(self, result: Result) -> float:
        """The speed-up that is compared: of whole requests where all results have it, else of decoding."""
        found = result.request if self.by_request else result.speed
        return 0.0 if found is None else found.value

    @property
    def by_request(self) -> bool:
        """Whether every result that has a speed has one of whole requests."""
        return all(r.request is not None for r in self.results if r.speed is not None)


def groups_of(sources: Sequence[Source]) -> list[Group]:
    """Every group; a run that stands in a table too counts once, in the table's."""
    found: dict[Any, Group] = {}
    tabled: dict[str, tuple[Group, int]] = {}
    for source in of_kind(sources, "quality-table"):
        for row in source.data["runs"]:
            result, data = _of_row(row), (source.data.get("task", {}).get("data_sha256"), row["n"])
            group = found.setdefault((data, *_yardstick(source)), _table_group(source, row["n"]))
            identity = _identity(data, result)
            if identity not in [_identity(data, other) for other in group.results]:
                tabled.setdefault(identity, (group, len(group.results)))
                group.results.append(result)
    for source in of_kind(sources, "evaluation"):
        run, result = source.data, _of_run(source.data)
        config = run.data["config"]
        data = config.get("data_sha256"), run.data["n"]
        if place := tabled.get(_identity(data, result)):
            group, number = place
            group.results[number] = replace(group.results[number], run=run)
        else:
            key = data, config.get("model"), _signatures(run)
            found.setdefault(key, _run_group(run)).results.append(result)
    return [replace(group, results=_arranged(group)) for group in found.values()]


def _arranged(group: Group) -> list[Result]:
    """Curves of several checkpoints named with each, and what is kept where only the yardstick's scores say it."""
    checkpoints = Counter(curve for curve, _ in {(r.curve, r.model) for r in group.results})
    full, results = group.full, []
    for r in group.results:
        if checkpoints[r.curve] > 1 and r.model not in r.curve:
            r = replace(r, curve=f"{r.curve}, {r.model}", name=f"{r.curve}, {r.model}{r.name.removeprefix(r.curve)}")
        if r is full:
            r = replace(r, kept={m: Bounded(1.0) for m in r.scores if m in METRICS})
        elif full is not None and not r.kept:
            common = [m for m in r.scores if m in full.scores and m in METRICS and full.scores[m].value]
            r = replace(r, kept={m: Bounded(r.scores[m].value / full.scores[m].value) for m in common})
        results.append(r)
    return sorted(results, key=lambda r: (not r.full, r.curve, r.nominal or 0.0))


def _identity(data: Any, result: Result) -> str:
    """What a run and its row in a table have in common, and no other: records, decoding, scores."""
    return repr((data, result.decoding, sorted((name, score.value) for name, score in result.scores.items())))


# ---------------------------------------------------------------------- rows of tables


def _yardstick(source: Source) -> tuple[Any, ...]:
    full = _full_row(source)
    return source.data.get("model"), full.get("checkpoint"), repr(full.get("retained") and _of_row(full).scores)


def _full_row(source: Source) -> Mapping[str, Any]:
    return next((row for row in source.data["runs"] if row["method"] == "full"), {})


def _table_group(source: Source, records: int) -> Group:
    data = source.data
    yardstick = _full_row(source).get("checkpoint", "")
    cpu = str(data.get("environment", {}).get("cpu", ""))
    return Group(data.get("task", {}).get("name", ""), data.get("model") or source.name, records, yardstick, cpu)


def _of_row(row: Mapping[str, Any]) -> Result:
    nominal = row.get("nominal_speedup")
    return Result(
        name=row["method"] + ("" if nominal is None else f" {nominal:.2g}x"),
        curve=row["method"],
        model=row.get("checkpoint", ""),
        full=row["method"] == "full" or row["method"].startswith("full,"),
        decoding=row.get("decoding"),
        nominal=nominal,
        request=_bounded(row.get("measured_speedup_with_prompt"), row.get("measured_speedup_with_prompt_interval")),
        speed=_bounded(row.get("measured_speedup"), row.get("measured_speedup_interval")),
        layers=row.get("mean_layers"),
        scores={name: Bounded(row[name], (low, high)) for name, (low, high) in row["intervals"].items()},
        kept={m: Bounded(e["share"], _pair(e)) for m, e in row["retained"].items() if e is not None},
        measured=_with(row.get("speed_from") or {}),
    )


def _bounded(value: float | None, bounds: Any = None) -> Bounded | None:
    """From a value and its bounds, in a list or by name, of which either may be missing."""
    if value is None:
        return None
    low, high = (bounds["low"], bounds["high"]) if isinstance(bounds, Mapping) else bounds or (None, None)
    return Bounded(value, None if low is None or high is None else (low, high))


def _with(source: Mapping[str, Any]) -> str:
    """Engine, batch, numbers and threads of a measurement."""
    patterns = ("{engine} engine", "batch {batch_size}", "{dtype}", "{quantization}", "{threads}")
    known = {name: value for name, value in source.items() if value not in (None, "none")}
    if threads := known.get("threads"):
        known["threads"] = f"{threads} thread{'' if threads == 1 else 's'}"
    return ", ".join(p.format_map(known) for p in patterns if p[p.index("{") + 1 : p.index("}")] in known)


# ---------------------------------------------------------------------- runs


def model_of(run: Run) -> str:
    """The name of the checkpoint."""
    return Path(str(run.data["config"].get("model"))).name


def _run_group(run: Run) -> Group:
    data, config, model = run.data, run.data["config"], model_of(run)
    return Group(config.get("task", {}).get("name", ""), model, data["n"], model, data["environment"].get("cpu", ""))


def _signatures(run: Run) -> tuple[tuple[str, str], ...]:
    metrics = {name: entry["signature"] for name, entry in run.data["metrics"].items() if name in METRICS}
    return tuple(sorted(metrics.items()))


def _of_run(run: Run) -> Result:
    data, config = run.data, run.data["config"]
    used = {name: config.get(name) for name in ("dtype", "quantization")}
    used |= {"engine": data.get("engine"), "threads": data["environment"].get("threads")}
    used |= {"batch_size": config.get("settings", {}).get("batch_size")}
    with_prompt = data.get("measured_speedup_with_prompt")
    return Result(
        name=run.name,
        curve=_curve(run),
        model=model_of(run),
        full=run.full_depth,
        decoding=config.get("method"),
        nominal=data.get("nominal_speedup"),
        request=_bounded(with_prompt, data.get("measured_speedup_with_prompt_interval")),
        speed=_bounded(run.measured_speedup, data.get("measured_speedup_interval")),
        layers=run.layers_per_token,
        scores={m: Bounded(e["score"], _pair(e["interval"])) for m, e in data["metrics"].items()},
        kept={m: Bounded(e["estimate"], _pair(e)) for m, e in data["kept"].items() if e is not None},
        measured=_with(used),
        run=run,
    )


def _curve(run: Run) -> str:
    """The name of the run without its speed-up: that of its schedule where the schedule has the run's name."""
    found = run.data["config"].get("method", {}).get("schedule")
    schedule = None if found is None else Schedule.from_dict(found)
    return schedule.curve if schedule is not None and schedule.name == run.name else run.name


def _pair(bounds: Mapping[str, float]) -> tuple[float, float]:
    return bounds["low"], bounds["high"]
