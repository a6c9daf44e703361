"""From a checkpoint to a fast one in minutes: layer order and fit, then tuning from the fit, both evaluated.

  skipdecode prepare MODEL --target-speedup 1.5 --task e2e --train train.jsonl --dev dev.jsonl --out ready
  skipdecode prepare MODEL --target-speedup 1.25 --self --out ready
  skipdecode prepare TUNED --target-speedup 2 --self --task e2e --prompts train.jsonl --test test.jsonl --out ready

The verbs calibrate, tune and eval in one. --minutes is the time of order, fit and tuning together: tuning gets what the
other two leave. Answers (--self) and evaluations come on top. With --self the model learns its own answers at full
depth; a checkpoint that is tuned at full depth needs no responses then.
--resume continues an interrupted run. With other --minutes it takes order and fit over, and compares what the minutes
brought.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from skipdecode.calibration.settings import OrderMethod
from skipdecode.cli import calibrate, eval, tune
from skipdecode.cli.arguments import command_line, flag
from skipdecode.cli.columns import figures
from skipdecode.cli.options import NamedModel
from skipdecode.cli.options.records import RecordOptions, make_template
from skipdecode.common.directories import RunDirectory
from skipdecode.common.files import write_whole
from skipdecode.common.kinds import heading, read_result
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.data.self_generated import SelfGeneratedOptions, open_prompts
from skipdecode.data.source import PromptSource
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.evaluation.metrics import METRICS
from skipdecode.evaluation.settings import MetricOptions
from skipdecode.schedule import Schedule
from skipdecode.tuning.run_log import LOG_FILE, read_log

__all__ = ["Config", "run"]

_FILE, _PICTURE, _TASK = "prepare.json", "kept.png", "task.yaml"
_DIRECTORY = RunDirectory("run of skipdecode prepare", {_FILE: "kind"})
_FORM = ("task", "prompt_template", "prompt_field", "response_field", "chat")
_LEAST_MINUTES = 0.02
_PACE, _DEV_RECORDS, _CANDIDATES = 25, 64, 3
_SHARES = (0.99, 0.98, 0.95)
_NEIGHBOURS = {"milder": 0.5, "faster": 1.25}
"""Of the target's gain in layers."""
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, SelfGeneratedOptions, RecordOptions, MetricOptions):
    """Options of `skipdecode prepare`."""

    target_speedup: float = option("wall-clock speed-up of whole requests, prompts included", default=1.5, above=1)
    minutes: float = option("for layer order, fit and tuning together; 0: no tuning", default=10.0, least=0)
    out: str = option("directory for all that is made", path=_DIRECTORY)
    resume: bool = option("go on with what an earlier run left in --out, whatever its minutes", default=False)
    train: str = option("JSON lines or CSV to learn from", default="", path=Reads())
    dev: str = option("JSON lines or CSV to choose the best weights by", default="", path=Reads())
    test: str = option(
        "JSON lines or CSV to evaluate on (default: --dev); with --self and no --task: prompts (default: drawn ones)",
        default="",
        path=Reads(),
    )
    test_records: int = option("records or prompts to evaluate on, at most", default=64, least=1)
    batch: int = option("rows decoded together", default=16, least=1)
    cost: str | None = option(
        "cost of a step, as skipdecode calibrate takes it (default: measured or predicted)", default=None, path=Reads()
    )
    method: OrderMethod = option(
        "of the layer order: block-influence takes one pass; greedy compares the loss of some 60 sets of layers",
        default="block-influence",
    )
    order_records: int = option("records on which layer orders and prompt sets are compared", default=8, least=1)
    fit: bool = option("fit bridges over skipped layers, and the prompts' keys and values", default=True)
    augment_names: tuple[str, ...] = option("as in skipdecode tune", default=())
    full: bool = option("tune all weights instead of a LoRA adapter", default=False)
    learning_rate: float = option("peak learning rate of the tuning", default=1e-3, above=0)
    seed: int = option("of all draws", default=0, least=0)
    json: bool = option("print the result as one JSON document", default=False)


def run(config: Config) -> int:
    """Prepare, evaluate and print."""
    prompts = _checked(config)
    state, minutes = _State.of(config), f"{config.minutes:g}"
    data: dict[str, Any] = {name: getattr(config, name) for name in ("train", "dev", *_FORM)}
    if config.self:
        data = state.stage("answers", lambda: _answers(config, prompts))
    state.stage("fit", lambda: _said(calibrate.run, _calibration(config, data)))
    state.stage("rows 0", lambda: {"rows": _rows(config, data, config.model, state.place / "fit")})
    left, tuned = config.minutes - state.stages["fit"]["seconds"] / 60, state.place / f"tuned-{minutes}"
    if left >= _LEAST_MINUTES:
        state.stage(f"tune {minutes}", lambda: _said(tune.run, _tuning(config, data, left, tuned)))
        state.stage(f"rows {minutes}", lambda: {"rows": _rows(config, data, str(tuned), tuned)})
    elif config.minutes:
        note(f"order and fit took {config.minutes - left:.1f} minutes: none are left to tune")
    document = _document(config, state, tuned)
    _draw(document, state.place / _PICTURE)
    print(json.dumps(document) if config.json else "\n".join(_lines(document)))
    return 0


@dataclass
class _State:
    """The stages that are done, what each gave and took, kept in OUT/prepare.json."""

    place: Path
    settings: dict[str, Any]
    stages: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, config: Config) -> _State:
        """What is there of this run; raises UsageError where OUT is of other options."""
        place, other = Path(config.out), ("minutes", "out", "json", "resume")
        given = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in other}
        settings, path = json.loads(json.dumps(given)), place / _FILE
        found = read_result(path, "prepared") if path.is_file() else {"settings": settings, "stages": {}}
        if wrong := [name for name in settings if found["settings"].get(name) != settings[name]]:
            raise UsageError(f"{path} is of a run with another {flag(wrong[0])}: repeat that, or give another --out")
        state = cls(place, settings, found["stages"])
        state._save()  # OUT is this run's from now on
        return state

    def stage(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What a stage gives, from an earlier run or done now."""
        if name not in self.stages:
            start, busy = time.perf_counter(), time.process_time()
            found = work()
            took = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
            self.stages[name] = found | {key: round(value, 1) for key, value in took.items()}
            self._save()
        return self.stages[name]

    def _save(self) -> None:
        document = heading("prepared") | {"settings": self.settings, "stages": self.stages}
        write_whole(self.place / _FILE, json.dumps(document, indent=1) + "\n")


def _checked(config: Config) -> PromptSource | None:
    """The file of prompts; refuses, before any work, what cannot be done as written."""
    prompts = open_prompts(config)
    if not config.self:
        if missing := [name for name in ("train", "dev") if not getattr(config, name)]:
            raise UsageError(f"{flag(missing[0])} is missing: give records with responses, or --self")
        make_template(config)
    elif given := [name for name in ("train", "dev") if getattr(config, name)]:
        raise UsageError(f"--self makes its own records from --prompts: leave out {flag(given[0])}")
    elif (prompts is not None or config.task) and not config.test:
        raise UsageError("--test is missing: with --prompts or --task, name records or prompts to evaluate on")
    return prompts


def _said(run: Callable[[C], int], config: C) -> dict[str, Any]:
    """What a verb prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(config)
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


# ---------------------------------------------------------------------- the verbs' options


def _answers(config: Config, prompts: PromptSource | None) -> dict[str, Any]:
    """The model's own answers at full depth, and what is prompt and response there."""
    asked = config.part(SelfGeneratedOptions).__dict__ | {"out": str(Path(config.out) / "answers")}
    made, template, _ = tune.self_generated(tune.Config(**_common(config), **asked), prompts)
    form: dict[str, Any] = dict.fromkeys(_FORM)
    if config.task:
        form |= {"task": config.task, "chat": False}
    else:
        form |= {"prompt_template": template.prompt, "response_field": template.responses[0], "chat": template.chat}
    return {"train": made.train, "dev": made.dev, **form}


def _calibration(config: Config, data: Mapping[str, Any]) -> calibrate.Config:
    """Of layer order, depth, prompt set and fit."""
    return calibrate.Config(
        **_common(config),
        **{name: data[name] for name in _FORM},
        data=data["train"],
        out=str(Path(config.out) / "fit"),
        target_speedup=config.target_speedup,
        batch=config.batch if config.cost is None else 1,
        cost=config.cost,
        records=config.order_records,
        held_out=0,  # the evaluation says more
        method=config.method,
        candidates=_CANDIDATES,
        fit=config.fit,
        resume=True,
        json=True,
    )


def _tuning(config: Config, data: Mapping[str, Any], minutes: float, place: Path) -> tune.Config:
    """Of the tuning from the fit, in the time that is left; answers of full depth are learned by its distributions."""
    return tune.Config(
        **_common(config),
        **{name: data[name] for name in ("train", "dev", *_FORM)},
        out=str(place),
        schedule=str(Path(config.out) / "fit" / "schedule.json"),
        minutes=minutes,
        distill_weight=1.0 if config.self else 0.0,
        learning_rate=config.learning_rate,
        full=config.full,
        augment_names=config.augment_names,
        merge=config.ref.adapter is not None and not config.full,
        eval_every=_PACE,
        checkpoint_every=_PACE,
        compare_batches=0,
        dev_records=_DEV_RECORDS,
        resume=True,
        json=True,
    )


def _common(config: Config) -> dict[str, Any]:
    # An answer, read again, may be a token longer, and at the context's end too long.
    bad_records = "skip" if config.self else config.bad_records
    return {"model": config.model, "seed": config.seed, "max_length": config.max_length, "bad_records": bad_records}


# ---------------------------------------------------------------------- evaluation


def _rows(config: Config, data: Mapping[str, Any], model: str, place: Path) -> list[dict[str, Any]]:
    """Full depth, the target and its neighbours, measured; `place` holds the fit that they are run with."""
    target = Schedule.load(Path(config.out) / "fit" / "schedule.json")
    asked: dict[str, Any] = {
        "model": model,
        "out": str(Path(config.out) / f"eval-{place.name}"),
        "methods": _neighbours(target, place),
        "batch_size": config.batch,
        "overwrite": True,
        "json": True,
    }
    if config.self and not config.task:
        asked |= config.part(SelfGeneratedOptions).__dict__
        asked |= {"prompts": config.test or None, "self_records": config.test_records, "base": config.model}
        return [_self_row(row) for row in _said(eval.run, eval.Config(**asked))["rows"]]
    asked |= config.part(MetricOptions).__dict__
    asked |= {"task": config.task or _task_file(config, 2 * target.seq_len), "data": config.test or config.dev}
    asked |= {"limit": config.test_records, "teacher_forced": False}
    return [_task_row(found) for found in _said(eval.run, eval.Config(**asked))["runs"]]


def _neighbours(target: Schedule, place: Path) -> tuple[str, ...]:
    """Files of the target and of a milder and a faster schedule in its order, where the order has them."""
    target.save(place / "target.json")
    files = [str(place / "target.json")]
    for name, share in _NEIGHBOURS.items():
        with contextlib.suppress(ScheduleError):
            other = target.with_speedup(1 + (target.nominal_speedup - 1) * share)
            if not other.is_full and other.budgets != target.budgets:
                replace(other, name=f"{target.name}, {name}").save(place / f"{name}.json")
                files.append(str(place / f"{name}.json"))
    return tuple(files)


def _task_file(config: Config, most: int) -> str:
    """A task file of the records' prompt and response, which is at most so many tokens long."""
    template, path = make_template(config), Path(config.out) / _TASK
    task = {"name": "records", "prompt": template.prompt, "references": list(template.responses), "chat": template.chat}
    write_whole(path, json.dumps(task | {"metrics": ["bleu", "rougeL", "chrf"], "max_new_tokens": most}))
    return str(path)


def _task_row(found: Mapping[str, Any]) -> dict[str, Any]:
    scores = {name: entry["score"] for name, entry in found["metrics"].items() if name in METRICS}
    return _speeds(found) | {"copied": found["metrics"].get("copied", {}).get("score"), "scores": scores}


def _self_row(found: Mapping[str, Any]) -> dict[str, Any]:
    ratio, obeyed = found["of_base"]["estimate"], found.get("instructions")
    scores = {"1 / perplexity": 100 / ratio} | ({"instructions": 100 * obeyed["followed"]} if obeyed else {})
    return _speeds(found) | {"perplexity_ratio": ratio, "scores": scores}


def _speeds(found: Mapping[str, Any]) -> dict[str, Any]:
    full = found["nominal_speedup"] == 1
    request, decode = (1.0 if full else found.get(f"measured_speedup{end}") for end in ("_with_prompt", ""))
    return {"name": found["name"], "full_depth": full, "request_speedup": request, "decode_speedup": decode}


# ---------------------------------------------------------------------- what is shown


def _document(config: Config, state: _State, tuned: Path) -> dict[str, Any]:
    """All rows by minutes with the share of full depth's scores that each keeps, and what the minutes brought."""
    every = {float(name[5:]): stage["rows"] for name, stage in state.stages.items() if name.startswith("rows ")}
    rows = [{"minutes": minutes, **row} for minutes, found in sorted(every.items()) for row in found]
    full = [row["scores"] for row in rows if row["full_depth"]]
    best = {name: max(scores.get(name, 0.0) for scores in full) for name in full[0]}
    for row in rows:
        row["kept"] = min(row["scores"][name] / score for name, score in best.items() if score)
    asked = float(f"{config.minutes:g}")  # as stages are called
    shown = asked if asked in every else 0.0
    seconds = {name: stage["seconds"] for name, stage in state.stages.items()}
    skipping = [row for row in rows if not row["full_depth"]]
    target = Schedule.load(state.place / "fit" / "schedule.json").name
    points = [(row["request_speedup"], row["kept"]) for row in skipping if row["minutes"] == shown]
    model = str(tuned) if shown else f"{shlex.quote(config.model)} --schedule {state.place / 'fit' / 'target.json'}"
    more = command_line("prepare", replace(config, minutes=max(20.0, 2 * config.minutes), resume=True))
    return heading("prepared") | {
        "minutes": shown,
        "seconds": seconds,
        "cpu_seconds": {name: stage["cpu_seconds"] for name, stage in state.stages.items()},
        "rows": [row for row in rows if row["minutes"] in (0.0, shown)],
        "kept_by_minutes": {row["minutes"]: row["kept"] for row in skipping if row["name"] == target},
        "speedup_that_keeps": {f"{share:.0%}": _speedup_that_keeps(points, share) for share in _SHARES},
        "dev_loss": _dev_losses(tuned / LOG_FILE),
        "next": [f"skipdecode generate {model} --compare 'Your prompt'", more],
    }


def _speedup_that_keeps(points: Sequence[tuple[float | None, float]], share: float) -> float:
    """The fastest request that keeps a share, between measured speed-ups by a straight line from full depth on."""
    found, measured = 1.0, sorted((speedup, kept) for speedup, kept in points if speedup is not None)
    for (slow, more), (fast, less) in pairwise([(1.0, 1.0), *measured]):
        if less >= share:
            found = max(found, fast)
        elif more >= share:
            found = max(found, slow + (fast - slow) * (more - share) / (more - less))
    return round(found, 3)


def _dev_losses(log: Path) -> list[tuple[float, float]]:
    """Minutes of tuning, and the loss on the dev records then."""
    rows = read_log(log)
    minutes = {row["step"]: row["minutes"] for row in rows if row["kind"] == "train"}
    return [(minutes[row["step"]], row["cross_entropy"]) for row in rows if row["kind"] == "dev"]


def _draw(document: Mapping[str, Any], path: Path) -> None:
    """What is kept at each speed-up, a line for the fit alone and one for the minutes."""
    from skipdecode.reporting.charts import Chart, Point, Series

    points: dict[str, list[Point]] = {}
    for row in document["rows"]:
        if row["request_speedup"] is not None and not row["full_depth"]:
            name = f"{row['minutes']:g} minutes" if row["minutes"] else "fit alone"
            points.setdefault(name, []).append(Point(row["request_speedup"], 100 * row["kept"]))
    series = [Series(name, sorted(found, key=lambda point: point.x), "-") for name, found in points.items()]
    tune.draw(Chart(series, "speed-up of requests", "kept of full depth, %"), path)


def _lines(document: Mapping[str, Any]) -> list[str]:
    columns = {
        "schedule": "{name}",
        "minutes": "{minutes:g}",
        "request": "{request_speedup:.2f}x",
        "decode": "{decode_speedup:.2f}x",
        "kept": "{kept:.1%}",
        **({"copied": "{copied:.1f}%"} if any(row.get("copied") for row in document["rows"]) else {}),
        **{name: f"{{scores[{name}]:.1f}}" for name in document["rows"][0]["scores"]},
    }
    took = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in document["seconds"].items())
    kept = ", ".join(f"{share:.1%} after {minutes:g}" for minutes, share in document["kept_by_minutes"].items())
    reach = ", ".join(f"{share} at {speedup:.2f}x" for share, speedup in document["speedup_that_keeps"].items())
    lines = ["kept: the worst score, of the better full depth's", "", *figures(columns, document["rows"]), ""]
    lines += [f"minutes: {took}", f"target, by minutes: {kept}", f"requests keep {reach}"]
    if len(losses := document["dev_loss"]) > 1:
        (_, before), (minutes, after) = losses[(len(losses) - 1) // 2], losses[-1]
        gain = f"their second half brought {before - after:.3f}"
        lines.append(f"dev loss {after:.3f} after {minutes:.1f} minutes of tuning; {gain}")
    return [*lines, f"next: {document['next'][0]}", f"more minutes: {document['next'][1]}"]
