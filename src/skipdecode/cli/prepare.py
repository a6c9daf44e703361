"""Make a checkpoint fast in minutes: layer order and fit, then tuning from the fit, and an evaluation of both.

  skipdecode prepare MODEL --target-speedup 1.5 --task e2e --train train.jsonl --dev dev.jsonl --out ready
  skipdecode prepare MODEL --target-speedup 1.25 --self --out ready
  skipdecode prepare TUNED --target-speedup 2 --self --task e2e --prompts train.jsonl --test test.jsonl --out ready

The command runs the verbs calibrate, tune and eval. --minutes is the time of layer order, fit and tuning together: the
tuning gets the time that the other two leave. Self-generated data (--self) and evaluations take additional time. With
--self, the model is trained on its own answers at full depth; a checkpoint that was tuned at full depth needs no other
responses.
--resume continues an interrupted run. With another value of --minutes, it reuses layer order and fit, and compares the
results of both values.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from skipdecode.calibration.goal import prompt_sets
from skipdecode.calibration.settings import CalibrationSettings, FitOptions, OrderMethod
from skipdecode.cli import calibrate, eval, tune
from skipdecode.cli.arguments import command_line, flag
from skipdecode.cli.options import NamedModel
from skipdecode.cli.options.evaluation import Config as EvalConfig
from skipdecode.cli.options.records import read_files, with_self_generated
from skipdecode.common.columns import figures
from skipdecode.common.directories import RunDirectory
from skipdecode.common.files import is_stream, write_whole
from skipdecode.common.journal import JOURNAL_KEY, KeptValues
from skipdecode.common.kinds import heading
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.common.rows import Input
from skipdecode.data.examples import RecordOptions, make_template
from skipdecode.data.source import PromptSource, load_records
from skipdecode.data.tasks import Task, load_task
from skipdecode.engine.loading import load
from skipdecode.errors import ScheduleError, SkipDecodeError, UsageError
from skipdecode.evaluation.kept import kept_columns, rows_of, speedups_that_keep, with_kept
from skipdecode.evaluation.settings import MetricOptions
from skipdecode.models.carried import FIT_FILE, RECIPE_FILE
from skipdecode.models.fit import Fit
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.reporting.charts import save_charts
from skipdecode.reporting.kept import kept_charts
from skipdecode.schedule import Schedule
from skipdecode.tuning.run_log import LOG_FILE, dev_losses
from skipdecode.tuning.self_generated import ABOUT_FILE, DEV_FILE, TRAIN_FILE, SelfGeneratedOptions, open_prompts

_JOURNAL, _RESULT = "prepare.jsonl", "prepared.json"
_PICTURE, _TASK = "kept.png", "task.yaml"
_DIRECTORY = RunDirectory(
    "run of skipdecode prepare",
    {_JOURNAL: JOURNAL_KEY, f"answers/{ABOUT_FILE}": "settings", f"fit/{calibrate.STORE_FILE}": JOURNAL_KEY},
)
_FORM = ("task", "prompt_template", "prompt_field", "response_field", "chat")
_NOT_KEPT = ("minutes", "out", "json", "resume")
_OUTPUTS = ("schedule.json", FIT_FILE, "config.json", "adapter_config.json", "*.safetensors")
_CLOCK, _CLOCK_SECONDS = "stage.json", 5.0
_LEAST_MINUTES = 0.02
_SOME_POSITIONS = 64  # to see whether a speed-up is possible at all
_HELD_OUT = 256  # self-generated records, at most
_PACE, _DEV_RECORDS, _CANDIDATES = 75, 64, 3
_BATCH, _RATE, _FULL_RATE = 4, 1e-3, 1e-4
"""Of tuning: records in a step, and learning rates of an adapter and of all weights."""
_NEIGHBOURS = {"milder": 0.5, "faster": 1.25}
"""Other schedules that are evaluated, with their share of the target's nominal gain."""
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, FitOptions, SelfGeneratedOptions, RecordOptions, MetricOptions):
    """Options of `skipdecode prepare`."""

    EXCLUDES: ClassVar = RecordOptions.EXCLUDES | {"self": ("train", "dev", "base")}

    target_speedup: float = option("wall-clock speed-up of whole requests, prompts included", default=1.5, above=1)
    minutes: float = option("minutes of layer order, fit and tuning together; 0: no tuning", default=10.0, least=0)
    out: str = option("directory for all results", path=_DIRECTORY)
    resume: bool = option("continue an earlier run in --out, which may have had other --minutes", default=False)
    train: str = option("JSONL or CSV file of training records", default="", path=Reads())
    dev: str = option("JSONL or CSV file of records that select the best weights", default="", path=Reads())
    test: str = option(
        "JSONL or CSV file of records to evaluate on (default: --dev); with --self and no --task: file of prompts "
        "(default: sampled prompts)",
        default="",
        path=Reads(),
    )
    test_records: int = option("most records or prompts to evaluate on", default=64, least=1)
    batch: int = option("sequences decoded together", default=16, least=1)
    cost: str | None = option(
        "cost of a step, as skipdecode calibrate takes it (default: measured or predicted)", default=None, path=Reads()
    )
    method: OrderMethod = option(
        "drop order by block-influence (one pass) or greedy (the measured loss of about 60 layer sets)",
        default="block-influence",
    )
    order_records: int = option("records on which drop orders and prompt sets are compared", default=8, least=1)
    prompt_depths: tuple[str, ...] = option(
        "prompt layers to try, as skipdecode calibrate takes them; in chats more of them keep more of the instructions "
        "(default: full, and 2/3, 1/2 and 1/3 of the layers)",
        default=(),
    )
    fit: bool = option("fit bridges over skipped layers, and keys and values of prompts", default=True)
    full: bool = option("tune all weights instead of a LoRA adapter", default=False)
    learning_rate: float | None = option(
        f"peak learning rate of tuning (default: {_RATE:g}, with --full {_FULL_RATE:g}); that of the fit is "
        f"{tune.Config.fit_learning_rate:g}",
        default=None,
        above=0,
    )
    distill_weight: float | None = option(
        "weight of the KL to full depth in the loss of tuning; cross-entropy on the responses has the rest "
        "(default: 1 with --self, 0 without)",
        default=None,
        least=0,
        most=1,
    )
    sampled_speedups: tuple[float, ...] = option(
        "nominal speed-ups that are tuned too, in half of the steps, so that one checkpoint serves them beside the "
        "target; 1: full depth (default: none)",
        default=(),
        least=1,
    )
    seed: int = option("seed of all random choices", default=0, least=0)
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Prepare, evaluate and print."""
    (prompts, files), out = _checked(config), Path(config.out)
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_KEPT}
    settings |= {"files": files, "checkpoint": checkpoint_digest(load(config.ref))}
    with closing(KeptValues(out / _JOURNAL, settings, pieces="stages", remedy="give another --out")) as kept:
        document = _prepared(config, prompts, kept)
    write_whole(out / _RESULT, json.dumps(document, indent=1) + "\n")
    target = Schedule.load(out / "fit" / "schedule.json").name
    charts = kept_charts(document["rows"], document["kept_by_minutes"], target, Path(config.model).name)
    save_charts(charts, out / _PICTURE)
    print(json.dumps(document) if config.json else "\n".join(_lines(document)))
    return 0


def _prepared(config: Config, prompts: PromptSource | None, kept: KeptValues) -> dict[str, Any]:
    """All stages, and the document of their results."""
    out, minutes, stage = Path(config.out), f"{config.minutes:g}", partial(_stage, kept)
    if config.self:
        data = stage("data", lambda: _answers(config, prompts))
    else:
        data = {name: getattr(config, name) for name in ("train", "dev", *_FORM)}
    fit = stage("fit", lambda: _said(calibrate.run, _calibration(config, data)), place=out / "fit")
    of = fit.get("files")
    stage("rows 0", lambda: {"rows": _rows(config, data, config.model, out / "fit")}, of=of)
    left, tuned = config.minutes - fit["seconds"] / 60, out / f"tuned-{minutes}"
    if left >= _LEAST_MINUTES:
        work = partial(_said, tune.run, _tuning(config, data, left, tuned))
        run = stage(f"tune {minutes}", work, place=tuned, of=of)
        stage(f"rows {minutes}", lambda: {"rows": _rows(config, data, str(tuned), tuned)}, of=[of, run["result"]])
    elif config.minutes:
        note(f"order and fit took {config.minutes - left:.1f} minutes: none are left to tune")
    return _document(config, dict(kept.read()), tuned)


def _stage(
    kept: KeptValues, name: str, work: Callable[[], dict[str, Any]], *, place: Path | None = None, of: Any = None
) -> dict[str, Any]:
    """The result of a stage with its times, from an earlier run or computed now.

    A stage is computed again if a file that it made in `place` is gone or changed, or if `of`, what it depends on, is
    not what it was.
    """
    stage: dict[str, Any] | None = kept.get(name)
    if stage is not None and place is not None and (lost := _lost(place, stage.get("files", {}))):
        note(f"{place / lost} is gone, or not the file that this run made: the stage {name!r} is done again")
        (place / RECIPE_FILE).unlink(missing_ok=True)  # else the tuning would be told as finished
        stage = None
    if stage is None or stage.get("of", of) != of:
        clock = kept.path.with_name(_CLOCK)
        with _counted(clock, name) as took:
            found = work()
        made = {} if place is None else {"files": _files(place)}
        kept.put(name, found | {key: round(value, 1) for key, value in took().items()} | made | {"of": of})
        clock.unlink(missing_ok=True)
        stage = dict(kept.get(name))
    return stage


def _files(place: Path) -> dict[str, str]:
    """The files of a stage that later stages and users need, with digests of the small ones."""
    files = (file for pattern in _OUTPUTS for file in sorted(place.glob(pattern)))
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    if file.suffix == ".safetensors":  # gigabytes
        return ""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _lost(place: Path, files: Mapping[str, str]) -> str | None:
    """The first file that is not there as it was made; None if all are."""
    return next((n for n, known in files.items() if not (place / n).is_file() or _digest(place / n) != known), None)


@contextlib.contextmanager
def _counted(file: Path, name: str) -> Iterator[Callable[[], dict[str, float]]]:
    """A context in which a stage's times are counted, on top of those of earlier processes; `file` keeps them."""
    before = {"seconds": 0.0, "cpu_seconds": 0.0}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["stage"] == name:
            before = {key: float(kept[key]) for key in before}
    start, busy, over = time.perf_counter(), time.process_time(), threading.Event()

    def took() -> dict[str, float]:
        now = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - busy}
        return {key: before[key] + value for key, value in now.items()}

    def keep() -> None:
        with contextlib.suppress(SkipDecodeError):
            write_whole(file, json.dumps({"stage": name} | took()))

    def keep_on() -> None:  # a kill leaves no time to write
        while not over.wait(_CLOCK_SECONDS):
            keep()

    thread = threading.Thread(target=keep_on, daemon=True)
    thread.start()
    try:
        yield took
    finally:
        over.set()
        thread.join()
        keep()


def _checked(config: Config) -> tuple[PromptSource | None, dict[str, str]]:
    """The file of prompts, and the digests of all files; refuses wrong options and records before any work."""
    prompts, digests = open_prompts(config), {}
    if not config.self:
        if missing := [name for name in ("train", "dev") if not getattr(config, name)]:
            raise UsageError(f"{flag(missing[0])} is missing: give records with responses, or --self")
        make_template(config)
    elif (prompts is not None or config.task) and not config.test:
        raise UsageError("--test is missing: with --prompts or --task, name records or prompts to evaluate on")
    depths = CalibrationSettings(target_speedup=config.target_speedup, prompt_depths=config.prompt_depths)
    prompt_sets(depths, config.ref.num_layers)
    for speedup in config.sampled_speedups:
        Schedule.from_speedup(config.ref.num_layers, speedup, _SOME_POSITIONS)
    for name, path in (("train", config.train), ("dev", config.dev), ("test", config.test)):
        if not path:
            continue
        if is_stream(path):
            raise UsageError(f"{flag(name)} is read several times, so it cannot be a pipe: give a file")
        with closing(Input.open(path)) as file:
            digests[name] = file.sha256
    _check_records(config)
    return prompts, digests | ({} if prompts is None else {"prompts": prompts.fingerprint["sha256"]})


def _check_records(config: Config) -> None:
    """Refuse files with records that cannot be used, as the verbs would after minutes of work."""
    if config.self and not config.task:
        if config.test:
            open_prompts(replace(config, prompts=config.test))
        return
    if not config.self:
        read_files(config, make_template(config), train=None, dev=None)
    task = load_task(config.task) if config.task else Task(**_records_task(config, 1))
    load_records(task, config.test or config.dev, skip_bad=config.bad_records == "skip", limit=config.test_records)


def _said(run: Callable[[C], int], config: C) -> dict[str, Any]:
    """What a verb prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run(config)
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


# ---------------------------------------------------------------------- the verbs' options


def _answers(config: Config, prompts: PromptSource | None) -> dict[str, Any]:
    """The files of the model's own answers at full depth, and the options for their prompt and response."""
    place = replace(config, out=str(Path(config.out) / "answers"))
    files = {"train": TRAIN_FILE, "dev": DEV_FILE}
    made, template, _ = with_self_generated(place, load(config.ref), prompts, _HELD_OUT, **files)
    form: dict[str, Any] = dict.fromkeys(_FORM) | {"chat": False}
    if config.task:
        form |= {"task": config.task}
    else:
        form |= {"prompt_template": template.prompt, "response_field": template.responses[0], "chat": template.chat}
    return {"train": made.train, "dev": made.dev, **form}


def _calibration(config: Config, data: Mapping[str, Any]) -> calibrate.Config:
    """The options of calibrate."""
    return calibrate.Config(
        **_common(config),
        **asdict(config.part(FitOptions)),
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
        prompt_depths=config.prompt_depths,
        fit=config.fit,
        resume=True,
        json=True,
    )


def _tuning(config: Config, data: Mapping[str, Any], minutes: float, place: Path) -> tune.Config:
    """The options of tune, which starts from the fit; self-generated answers are distilled from full depth."""
    rate = config.learning_rate or (_FULL_RATE if config.full else _RATE)
    weight = float(config.self) if config.distill_weight is None else config.distill_weight
    return tune.Config(
        **_common(config),
        **{name: data[name] for name in ("train", "dev", *_FORM)},
        out=str(place),
        schedule=str(Path(config.out) / "fit" / "schedule.json"),
        minutes=minutes,
        distill_weight=weight,
        **_sampled(config),
        learning_rate=rate,
        batch_size=_BATCH,
        full=config.full,
        merge=config.ref.adapter is not None and not config.full,
        eval_every=_PACE,
        checkpoint_every=_PACE,
        compare_batches=0,
        dev_records=_DEV_RECORDS,
        resume=True,
        json=True,
    )


def _sampled(config: Config) -> dict[str, Any]:
    """The curriculum: the target alone, or as often as all of --sampled-speedups together."""
    if not (others := config.sampled_speedups):
        return {}
    target = Schedule.load(Path(config.out) / "fit" / "schedule.json").nominal_speedup
    return {"sampled_speedups": (*others, *[target] * len(others))}


def _common(config: Config) -> dict[str, Any]:
    # An answer may be a token longer when it is read again, and then exceed the context.
    bad_records = "skip" if config.self else config.bad_records
    return {
        "model": config.model,
        "base": config.base,
        "seed": config.seed,
        "max_length": config.max_length,
        "bad_records": bad_records,
    }


# ---------------------------------------------------------------------- evaluation


def _rows(config: Config, data: Mapping[str, Any], model: str, place: Path) -> list[dict[str, Any]]:
    """Full depth, the target and its neighbours, measured with the fit in `place`."""
    target = Schedule.load(Path(config.out) / "fit" / "schedule.json")
    asked: dict[str, Any] = {
        "model": model,
        "out": str(Path(config.out) / f"eval-{place.name}"),
        "methods": _neighbours(target, place),
        "batch_size": config.batch,
        "bad_records": config.bad_records,
        "overwrite": True,
        "json": True,
    }
    if config.self and not config.task:
        asked |= {"prompts": config.test or None, "limit": config.test_records, "base": config.model}
        asked |= {"max_new_tokens": config.self_tokens}
        asked |= {"temperature": config.self_temperature, "top_p": config.self_top_p}
    else:
        asked |= {"base": config.base} if model == config.model else {}
        asked |= asdict(config.part(MetricOptions))
        asked |= {"task": config.task or _task_file(config, 2 * target.seq_len), "data": config.test or config.dev}
        asked |= {"limit": config.test_records, "teacher_forced": False}
    return rows_of(_said(eval.run, EvalConfig(**asked)))


def _neighbours(target: Schedule, place: Path) -> tuple[str, ...]:
    """Files of the target, and of a milder and a faster schedule if its drop order, and the fit, allow them."""
    target.save(place / "target.json")
    files = [str(place / "target.json")]
    fit = Fit.load(place / FIT_FILE) if (place / FIT_FILE).is_file() else None
    for name, share in _NEIGHBOURS.items():
        with contextlib.suppress(ScheduleError):
            other = target.with_speedup(1 + (target.nominal_speedup - 1) * share)
            if fit is not None and not fit.serves(other):  # no layer is skipped that has no bridge
                other = replace(other, budgets=tuple(max(n, target.budgets[-1]) for n in other.budgets))
            if not other.is_full and other.budgets != target.budgets and (fit is None or fit.serves(other)):
                replace(other, name=f"{target.name}, {name}").save(place / f"{name}.json")
                files.append(str(place / f"{name}.json"))
    return tuple(files)


def _task_file(config: Config, most: int) -> str:
    """A task file with the records' prompt and response; `most` is the maximum number of new tokens."""
    path = Path(config.out) / _TASK
    write_whole(path, json.dumps(_records_task(config, most)))
    return str(path)


def _records_task(config: Config, most: int) -> dict[str, Any]:
    """The fields of a task with the records' prompt and response."""
    template, metrics = make_template(config), ("bleu", "rougeL", "chrf")
    form = {"prompt": template.prompt, "references": template.responses, "chat": template.chat}
    return {"name": "records", **form, "metrics": metrics, "max_new_tokens": most}


# ---------------------------------------------------------------------- what is shown


def _document(config: Config, stages: Mapping[str, Any], tuned: Path) -> dict[str, Any]:
    """All rows by minutes with the share of full depth's scores that each keeps, and the gain of the minutes."""
    fit = Path(config.out) / "fit"
    every = {float(name[5:]): stage["rows"] for name, stage in stages.items() if name.startswith("rows ")}
    rows = with_kept([{"minutes": minutes, **row} for minutes, found in sorted(every.items()) for row in found])
    asked = float(f"{config.minutes:g}")  # as stages are called
    shown = asked if asked in every else 0.0
    target = Schedule.load(fit / "schedule.json").name
    final = [row for row in rows if row["minutes"] == shown]
    model = str(tuned) if shown else f"{shlex.join(config.words)} --schedule {fit / 'target.json'}"
    more = command_line("prepare", replace(config, minutes=max(20.0, 2 * config.minutes), resume=True))
    return heading("prepared") | {
        "minutes": shown,
        **{key: {name: stage[key] for name, stage in stages.items()} for key in ("seconds", "cpu_seconds")},
        "rows": [row for row in rows if row["minutes"] in (0.0, shown)],
        "kept_by_minutes": {row["minutes"]: row["kept"] for row in rows if row["name"] == target},
        "speedup_that_keeps": speedups_that_keep(final),
        "dev_loss": dev_losses(tuned / LOG_FILE),
        "next": [f"skipdecode generate {model} --compare 'Your prompt'", more],
    }


def _lines(document: Mapping[str, Any]) -> list[str]:
    took = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in document["seconds"].items())
    rows, known = document["rows"], {m: kept for m, kept in document["kept_by_minutes"].items() if kept is not None}
    lines = ["kept: the smallest share of a score at full depth", "", *figures(kept_columns(rows), rows), ""]
    lines += [f"minutes: {took}"]
    if known:
        kept = ", ".join(f"{share:.1%} after {minutes:g}" for minutes, share in known.items())
        lines += [f"target, by minutes: {kept}", f"requests keep {_reach(document['speedup_that_keeps'])}"]
    else:
        lines += ["every score of full depth is 0, so there is no share to keep: tune the model at full depth first"]
    if len(losses := document["dev_loss"]) > 1:
        (_, before), (minutes, after) = losses[(len(losses) - 1) // 2], losses[-1]
        gain = f"their second half brought {before - after:.3f}"
        lines.append(f"dev loss {after:.3f} after {minutes:.1f} minutes of tuning; {gain}")
    return [*lines, f"next: {document['next'][0]}", f"more minutes: {document['next'][1]}"]


def _reach(speedups: Mapping[str, float | None]) -> str:
    """The speed-up that keeps each share."""
    return ", ".join(f"{share} at {f'{x:.2f}x' if x else 'no speed-up'}" for share, x in speedups.items())
