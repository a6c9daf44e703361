"""`skipdecode.prepare`: from records or prompts to a fast checkpoint by one clock, with an evaluation of the result."""

from __future__ import annotations

import contextlib
import hashlib
import html
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from skipdecode.common.files import is_stream, write_whole
from skipdecode.common.jsonl import json_line
from skipdecode.common.kinds import heading
from skipdecode.common.progress import note
from skipdecode.common.rows import Input
from skipdecode.common.tables import figures
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.model import CostModel
from skipdecode.cost.source import read_cost
from skipdecode.data.examples import (
    RecordOptions,
    Source,
    decide_chat,
    encode_source,
    held_out,
    make_template,
    read_sources,
)
from skipdecode.data.prompts import RecordFile
from skipdecode.data.source import PromptSource, load_records
from skipdecode.data.tasks import Task, load_task
from skipdecode.engine.loading import Model, load, ref_of
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.evaluation.evaluate import evaluate
from skipdecode.evaluation.kept import fastest_that_keeps, kept_columns, speedups_that_keep, with_kept
from skipdecode.evaluation.pictures import kept_charts, save_charts
from skipdecode.evaluation.settings import MetricOptions
from skipdecode.generation.llm import LLM
from skipdecode.generation.self_generated import DEV_FILE, TRAIN_FILE, open_prompts, own_answers
from skipdecode.learning.calibrate import SCHEDULE_FILE, calibrate
from skipdecode.learning.goal import prompt_sets
from skipdecode.learning.minutes import SHARES, Pace
from skipdecode.learning.settings import (
    PREPARE_DIRECTORY,
    PREPARE_JOURNAL,
    PROMPTS_FILE,
    CalibrationSettings,
    FitOptions,
    PrepareOptions,
)
from skipdecode.learning.stages import Stages
from skipdecode.learning.tune import copied, tune
from skipdecode.models.carried import FIT_FILE
from skipdecode.models.fit import Fit, fit_of, keep_fit
from skipdecode.models.loading.base_weights import checkpoint_digest, put_fit
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.schedule import Schedule

_RESULT, _PICTURE = "prepared.json", "kept.png"
_FORM = ("task", "prompt_template", "prompt_field", "response_field", "chat")
_OUTPUTS = (SCHEDULE_FILE, FIT_FILE, "config.json", "adapter_config.json", "*.safetensors")
_LEAST_MINUTES = 0.02
_SOME_TUNING = 0.1  # of the minutes: with less, more minutes are recommended
_MORE = 1.5  # times what the other stages took
_ENDING = 1.05  # of the time of the first evaluation: the last one loads the tuned model
_PROMPT_DEPTHS = range(4)  # of `calibrate`, by default
_SOME_RECORDS = 64  # to see how long texts are
_SOME_POSITIONS = 64  # to see whether a speed-up is possible at all
_HELD_OUT = 256  # of the model's own answers, at most
_PACE, _DEV_RECORDS, _CANDIDATES, _BATCH = 75, 64, 3, 4
_NEIGHBOURS = {"slower": 0.5, "faster": 1.25}  # also evaluated: their shares of the target's nominal gain
_TIMES = {"answers": "own answers", "sizes": "timing", "layers": "choosing layers"}


@dataclass(frozen=True, repr=False)
class Prepared:
    """The result of `prepare`. Prints itself, also in a notebook.

    Attributes
    ----------
    document : mapping
        All results, JSON-ready, as in prepared.json.
    out : Path
        The directory of all results.
    """

    document: Mapping[str, Any]
    out: Path
    _loaded: LoadedModel

    @property
    def path(self) -> Path | None:
        """The directory of the tuned checkpoint; None if nothing was tuned."""
        minutes = self.document["minutes"]
        return _tuned(self.out, minutes) if minutes else None

    @property
    def schedule_file(self) -> Path:
        """The file of the schedule, beside its fit; the tuned checkpoint has both too."""
        return self.out / "fit" / SCHEDULE_FILE

    @property
    def schedule(self) -> Schedule:
        """The schedule for the target."""
        return Schedule.load(self.schedule_file)

    @cached_property
    def llm(self) -> LLM:
        """The prepared model, ready to generate text with its schedule."""
        if self.path is not None:
            return LLM(self.path)
        if (file := self.schedule_file.with_name(FIT_FILE)).is_file():
            put_fit(self._loaded.model, file, [self.schedule_file])
        return LLM(self._loaded, self.schedule)

    @property
    def recommended(self) -> Mapping[str, Any] | None:
        """The fastest row that keeps the share of `keep`; None without `keep`, or if only full depth does."""
        keep = self.document["keep"]
        return None if keep is None else fastest_that_keeps(self.rows, keep)

    def schedule_of(self, row: Mapping[str, Any]) -> Path:
        """The file of the schedule of one of the rows."""
        place = _tuned(self.out, row["minutes"]) if row["minutes"] else self.schedule_file.parent
        near = (place / f"{name}.json" for name in _NEIGHBOURS if f", {name}" in row["name"])
        return next(near, self.schedule_file)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each evaluated schedule: minutes, name, request_speedup, decode_speedup, scores, kept and more."""
        return list(self.document["rows"])

    def __str__(self) -> str:
        return "\n".join(_lines(self.document, self.schedule.name))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def prepare(
    model: Model,
    train: Source | None = None,
    dev: Source | None = None,
    *,
    test: Source | None = None,
    prompts: str | Path | Sequence[str] | None = None,
    cost: CostModel | str | Path | None = None,
    out: str | Path,
    started: float | None = None,
    **options: Any,
) -> Prepared:
    """Make a model fast: choose layers and a fit, tune under the schedule, and evaluate before and after.

    An interrupted call continues. With other `minutes`, the layers and the fit are reused, and the results compared.

    Parameters
    ----------
    model : LLM, LoadedModel, str or Path
        A model that is loaded, which stays as it is, or a name as for `skipdecode.load`.
    train, dev : str, Path or list of mapping, optional
        Records to learn from, and records that select the best weights: files (JSONL, JSON, Parquet, CSV) or lists.
        Without `dev`, every tenth record of `train` is held out. Without both, the model learns its own answers to
        `prompts` at full depth.
    test : str, Path or list of mapping, optional
        Records to evaluate on. Default: `dev`. For own answers without a task: a file of prompts; default: drawn.
    prompts : str, Path or list of str, optional
        For own answers: a file of prompts, or prompts. Default: the model draws them, by its chat template.
    cost : CostModel, str or Path, optional
        Cost of a step; see `skipdecode.calibrate`.
    out : str or Path
        Directory for all results.
    started : float, optional
        `time.perf_counter()` when the minutes began. Default: now.
    **options
        Fields of `PrepareOptions`: target_speedup, minutes, keep, batch, prompt_depths, seed, …; task, or
        prompt_template or prompt_field, with response_field (default: by the shape of the records).

    Raises
    ------
    TargetError
        No schedule reaches the target.
    DataError, UsageError
        Records or options cannot be used, or `out` has a run with other ones.
    """
    started = time.perf_counter() if started is None else started
    options.setdefault("self", train is None and dev is None)
    place = Path(out)
    PREPARE_DIRECTORY.check(place, resume=True)
    if prompts is not None and not isinstance(prompts, str | Path):
        write_whole(place / PROMPTS_FILE, b"".join(json_line({"prompt": prompt}) for prompt in prompts))
        prompts = place / PROMPTS_FILE
    settings = PrepareOptions(prompts=None if prompts is None else str(prompts), **options)
    sources = {"train": train, "dev": dev, "test": test}
    run = _Run(settings, model, {name: one for name, one in sources.items() if one}, cost, place)
    return run.run(started)


class _Run:
    """The arguments of `prepare`, and its stages."""

    def __init__(
        self,
        settings: PrepareOptions,
        model: Model,
        sources: Mapping[str, Source],
        cost: CostModel | str | Path | None,
        out: Path,
    ) -> None:
        self.settings, self.sources, self.cost, self.out = settings, dict(sources), cost, out
        self.rewritten: dict[str, RecordFile] = {}
        self.fit = out / "fit"
        self.prompts, self.digests = self._checked(ref_of(model).num_layers)
        loaded = getattr(model, "loaded", model)
        # All stages share this model: `calibrate` and `tune` copy its weights where they need another type or change
        # them. A tuned checkpoint is loaded from its files, and a first measurement of costs loads its own.
        self.loaded: LoadedModel = loaded if isinstance(loaded, LoadedModel) else load(ref_of(model))

    # ------------------------------------------------------------------ checks

    def _checked(self, layers: int) -> tuple[PromptSource | None, dict[str, str]]:
        """The prompts, and the digests of all records; refuses wrong options and records before any work."""
        settings = self.settings
        prompts = open_prompts(settings)
        if not settings.self:
            if "train" not in self.sources:
                raise UsageError("`train` is missing: give records with responses, or `self`")
            self.template = make_template(settings, self.sources["train"])
        elif (prompts is not None or settings.task) and "test" not in self.sources:
            raise UsageError("`test` is missing: with `prompts` or `task`, give records or prompts to evaluate on")
        depths = CalibrationSettings(target_speedup=settings.target_speedup, prompt_depths=settings.prompt_depths)
        prompt_sets(depths, layers)
        for speedup in settings.sampled_speedups:
            Schedule.from_speedup(layers, speedup, _SOME_POSITIONS)
        if isinstance(self.cost, str | Path):
            read_cost(self.cost)
        digests = {name: _digest(name, source) for name, source in self.sources.items()}
        self._check_records()
        return prompts, digests | ({} if prompts is None else {"prompts": prompts.fingerprint["sha256"]})

    def _check_records(self) -> None:
        """Refuse records that cannot be used, as the stages would after minutes of work."""
        settings, test = self.settings, self._test
        if settings.self and not settings.task:
            if isinstance(test, str | Path):
                open_prompts(replace(settings, prompts=str(test)))
            return
        if not settings.self:
            whole = self.template.shape is not None
            learned = {
                name: self.sources[name] for name in ("train", "dev", "test")[: 2 + whole] if name in self.sources
            }
            files = read_sources(learned, self.template, {}, skip_bad=settings.skips_bad)
            if whole or "dev" not in files:
                self.rewritten = files
            if "dev" not in files:
                files["train"], files["dev"] = held_out(files["train"])
        if test is not None and not (self.rewritten and self.template.shape):
            load_records(self._task(1), test, skip_bad=settings.skips_bad, limit=settings.test_records)

    @property
    def _test(self) -> Any:
        return self.sources.get("test") or self.sources.get("dev")

    def _task(self, most: int) -> Task:
        """The task, or the records' prompt and response; `most` is the maximum number of new tokens."""
        if self.settings.task:
            return load_task(self.settings.task)
        template = make_template(self.settings) if self.settings.self else self.template
        form: dict[str, Any] = {
            "prompt": template.prompt,
            "references": template.responses,
            "chat": bool(template.chat),
        }
        return Task(name="records", **form, metrics=("bleu", "rougeL", "chrf"), max_new_tokens=most)

    # ------------------------------------------------------------------ stages

    def run(self, started: float) -> Prepared:
        settings, out, minutes = self.settings, self.out, f"{self.settings.minutes:g}"
        kept = {name: value for name, value in asdict(settings).items() if name not in ("minutes", "keep", "prompts")}
        kept |= {"ways": settings.keep is not None}
        kept |= {"files": self.digests, "cost": self.cost and str(self.cost), "model": self.loaded.name}
        kept |= {"checkpoint": checkpoint_digest(self.loaded) | {"fit": None}}  # the run makes its own
        tuned = _tuned(out, settings.minutes)
        with closing(Stages(out / PREPARE_JOURNAL, kept, _OUTPUTS)) as stages:
            note(self._plan())
            data = stages.run("answers", self._answers) if settings.self else self._given()
            sizes = stages.run("sizes", lambda: self._sizes(data)) if settings.minutes else {}
            layers = stages.run("layers", lambda: self._chosen(data, sizes), place=self.fit)
            self.__dict__.pop("_precise", None)  # its memory is for the tuning
            of, size = layers.get("files"), self._evaluation(sizes, layers)
            before = stages.run("evaluation 0", lambda: self._evaluated(size), of=of)
            size = before["size"]
            over = settings.minutes - (stages.spent(started) + _ENDING * before["seconds"]) / 60
            left = stages.run(f"left {minutes}", lambda: {"minutes": over})["minutes"]  # the same if it is resumed
            if settings.minutes and left < _SOME_TUNING * settings.minutes:
                enough = _MORE * (settings.minutes - left)
                note(f"{minutes} minutes leave {max(0.0, left):.1f} to tune: `minutes` of {enough:.0f} leave a third")
            if left >= _LEAST_MINUTES:
                records = sizes.get("dev_records", _DEV_RECORDS)
                run = stages.run(
                    f"tuning {minutes}", lambda: self._tuned(data, left, tuned, records), place=tuned, of=of
                )
                stages.run(f"evaluation {minutes}", lambda: self._evaluated(size, tuned), of=[of, run["result"]])
            document = self._document(stages.finished())
        write_whole(out / _RESULT, json.dumps(document, indent=1) + "\n")
        target, name = Schedule.load(self.fit / SCHEDULE_FILE).name, Path(self.loaded.name).name
        charts = kept_charts(document["rows"], document["kept_by_minutes"], target, name)
        save_charts(charts, out / _PICTURE)
        return Prepared(document, out, self.loaded)

    def _plan(self) -> str:
        """The stages, with their minutes."""
        if not (minutes := self.settings.minutes):
            return "plan: choosing layers and an evaluation, without limit; no tuning"
        stages = {name: share * minutes for name, share in SHARES.items() if name != "answers" or self.settings.self}
        told = ", ".join(f"{_TIMES.get(name, name)} up to {most:.1f} min" for name, most in stages.items())
        return f"plan: {told}, tuning the other {minutes - sum(stages.values()):.1f} min or more"

    @cached_property
    def _precise(self) -> LoadedModel:
        """The model in the type in which `calibrate` works, which copies any other."""
        model = self.loaded.model
        if model.device.type != "cpu" or model.dtype == torch.float32:
            return self.loaded
        return replace(self.loaded, model=copied(model, torch.float32))

    def _sizes(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The speed of the model on the records, and the options of `calibrate` that fit into its time."""
        settings, loaded = self.settings, self._precise
        options = RecordOptions(**{n: value for n, value in self._shared(data).items() if n != "seed"})
        template = make_template(options)
        (file,) = read_sources({"train": data["train"]}, template, {"train": _SOME_RECORDS}, skip_bad=True).values()
        pace = Pace.of(loaded.model, encode_source(file, "train", template, loaded, options)[0])
        depths, width = (
            settings.prompt_depths or _PROMPT_DEPTHS,
            ModelGeometry.from_config(loaded.ref.config).hidden_size,
        )
        return {
            "pace": asdict(pace),
            "layers": pace.search(60 * SHARES["layers"] * settings.minutes, width, len(depths)),
            "dev_records": pace.dev_records(60 * settings.minutes, _DEV_RECORDS),
        }

    def _evaluation(self, sizes: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
        """The size of each of two evaluations."""
        settings = self.settings
        if not sizes:
            return {"records": settings.test_records, "neighbours": True, "speed_batches": 4}
        target = layers["verdicts"][-1]
        return Pace(**sizes["pace"]).evaluation(
            60 * SHARES["evaluation"] * settings.minutes / 2,
            layers["seconds_per_batch"],
            layers["cost"]["batch"],
            settings.test_records,
            target["request_speedup"],
            settings.self and not settings.task,
            settings.keep is not None,
        )

    def _given(self) -> dict[str, Any]:
        """The records and their form: as they are, or, of a known shape or with a part held out, as new files."""
        form, template = {name: getattr(self.settings, name) for name in _FORM}, self.template
        for name, file in self.rewritten.items():
            rows = (
                {"id": one.id, **(one.values or {"prompt": one.prompt}), template.responses[0]: one.references[0]}
                for one in file.records
            )
            place = self.sources[name] = self.out / "records" / f"{name}.jsonl"
            write_whole(place, b"".join(map(json_line, rows)))
        if template.shape is not None:
            decide_chat(template, self.loaded)
            form |= {"prompt_field": "prompt", "response_field": "response", "chat": template.chat}
        return {"train": self.sources["train"], "dev": self.sources["dev"], "form": form}

    def _answers(self) -> dict[str, Any]:
        """The files of the model's own answers at full depth, and the options for their prompt and response."""
        settings, place = self.settings, self.out / "answers"
        sizes = {"seed": settings.seed, "held_out": _HELD_OUT}
        seconds = 60 * SHARES["answers"] * settings.minutes or None
        template, _ = own_answers(self.loaded, settings, settings, self.prompts, place, **sizes, seconds=seconds)
        form: dict[str, Any] = {"task": settings.task}
        if not settings.task:
            form = {"prompt_template": template.prompt, "response_field": template.responses[0], "chat": template.chat}
        return {"train": str(place / TRAIN_FILE), "dev": str(place / DEV_FILE), "form": form}

    def _shared(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Options of both `calibrate` and `tune`."""
        settings = self.settings
        # An answer may be a token longer when it is read again, and then exceed the context.
        bad_records = "skip" if settings.self else settings.bad_records
        shared: dict[str, Any] = {"seed": settings.seed, "max_length": settings.max_length, "bad_records": bad_records}
        return shared | dict(data["form"])

    def _chosen(self, data: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Choose the layers, and fit the maps that replace them."""
        settings = self.settings
        names = ("target_speedup", "method", "prompt_depths", *(field.name for field in fields(FitOptions)))
        options = {name: getattr(settings, name) for name in names} | {"records": settings.order_records}
        found = calibrate(
            self._precise,
            data["train"],
            out=self.fit,
            cost=self.cost,
            **self._shared(data),
            **options | dict(sizes.get("layers", {})),
            batch=settings.batch if self.cost is None else 1,
            held_out=0,  # the evaluation says more
            candidates=_CANDIDATES,
        )
        return dict(found.document)

    def _tuned(self, data: Mapping[str, Any], minutes: float, place: Path, dev_records: int) -> dict[str, Any]:
        """Tune from the fit; own answers are distilled from full depth."""
        settings = self.settings
        rate = settings.FULL_RATE if settings.full else settings.RATE
        found = tune(
            self.loaded,
            data["train"],
            data["dev"],
            out=place,
            schedule=self.fit / SCHEDULE_FILE,
            minutes=minutes,
            resume=True,
            **self._shared(data),
            **self._sampled(),
            distill_weight=float(settings.self) if settings.distill_weight is None else settings.distill_weight,
            learning_rate=settings.learning_rate or rate,
            batch_size=_BATCH,
            full=settings.full,
            merge=self.loaded.ref.adapter is not None and not settings.full,
            eval_every=_PACE,
            checkpoint_every=_PACE,
            dev_records=dev_records,
        )
        return {"result": dict(found.result), "dev_loss": found.dev_losses}

    def _sampled(self) -> dict[str, Any]:
        """The sampled schedules: the target alone, or as often as all sampled speed-ups together."""
        if not (others := self.settings.sampled_speedups):
            return {}
        target = Schedule.load(self.fit / SCHEDULE_FILE).nominal_speedup
        return {"sampled_speedups": (*others, *[target] * len(others))}

    def _evaluated(self, size: Mapping[str, Any], tuned: Path | None = None) -> dict[str, Any]:
        """Rows of full depth, the target and its neighbours: of the tuned checkpoint, or of the model with the fit."""
        with _fitted(self.loaded, self.fit / FIT_FILE):
            return {"rows": self._rows(LLM(self.loaded), size, tuned), "size": dict(size)}

    def _rows(self, llm: LLM, size: Mapping[str, Any], tuned: Path | None) -> list[dict[str, Any]]:
        settings, target, place = self.settings, Schedule.load(self.fit / SCHEDULE_FILE), tuned or self.fit
        asked: dict[str, Any] = {"batch_size": settings.batch, "bad_records": settings.bad_records}
        asked |= {"ways": settings.keep is not None, "limit": size["records"], "speed_batches": size["speed_batches"]}
        asked |= {"teacher_forced": False, "overwrite": True, "out": self.out / f"eval-{place.name}"}
        if settings.self and not settings.task:
            asked |= {"prompts": self.sources.get("test"), "max_new_tokens": settings.self_tokens}
            asked |= {"temperature": settings.self_temperature, "top_p": settings.self_top_p, "base": llm}
        else:
            asked |= {"data": self._test, "task": self._task(2 * target.seq_len)}
            asked |= asdict(settings.part(MetricOptions))
        schedules = neighbours(target, place) if size["neighbours"] else [target]
        return evaluate(tuned or llm, schedules=schedules, **asked).rows

    # ------------------------------------------------------------------ results

    def _document(self, stages: Mapping[str, Any]) -> dict[str, Any]:
        """All rows by minutes with the share of full depth's scores that each keeps, and the gain of the minutes."""
        split = {name: name.partition(" ")[::2] for name in stages}
        every = {float(of): stages[name]["rows"] for name, (kind, of) in split.items() if kind == "evaluation"}
        rows = with_kept([{"minutes": minutes, **row} for minutes, found in sorted(every.items()) for row in found])
        asked = f"{self.settings.minutes:g}"  # as stages are called
        shown = float(asked) if float(asked) in every else 0.0
        target = Schedule.load(self.fit / SCHEDULE_FILE).name
        return heading("prepared") | {
            "model": self.loaded.name,
            "minutes": shown,
            "keep": self.settings.keep,
            **{key: {name: stage[key] for name, stage in stages.items()} for key in ("seconds", "cpu_seconds")},
            "rows": [row for row in rows if row["minutes"] in (0.0, shown)],
            "kept_by_minutes": {row["minutes"]: row["kept"] for row in rows if row["name"] == target},
            "speedup_that_keeps": speedups_that_keep([row for row in rows if row["minutes"] == shown]),
            "dev_loss": stages.get(f"tuning {asked}", {}).get("dev_loss", []),
        }


def _tuned(out: Path, minutes: float) -> Path:
    return out / f"tuned-{minutes:g}"


def _digest(name: str, source: Source) -> str:
    """The digest of records."""
    if not isinstance(source, str | Path):
        return hashlib.sha256(b"".join(map(json_line, source))).hexdigest()
    if is_stream(str(source)):
        raise UsageError(f"`{name}` is read several times, so it cannot be a pipe: give a file")
    with closing(Input.open(str(source))) as file:
        return str(file.sha256)


@contextlib.contextmanager
def _fitted(loaded: LoadedModel, file: Path) -> Iterator[None]:
    """A context in which a model has the fit of a file, if there is one."""
    before = fit_of(loaded.model)
    if file.is_file():
        put_fit(loaded.model, file)
    try:
        yield
    finally:
        keep_fit(loaded.model, before)


def neighbours(target: Schedule, place: Path) -> list[Schedule]:
    """The target, and a slower and a faster schedule if its drop order, and the fit in `place`, allow them."""
    found = [target]
    fit = Fit.load(place / FIT_FILE) if (place / FIT_FILE).is_file() else None
    for name, share in _NEIGHBOURS.items():
        with contextlib.suppress(ScheduleError):
            other = target.with_speedup(1 + (target.nominal_speedup - 1) * share)
            if fit is not None and not fit.serves(other):  # no layer is skipped that has no map
                other = replace(other, budgets=tuple(max(n, target.budgets[-1]) for n in other.budgets))
            if not other.is_full and other.budgets != target.budgets and (fit is None or fit.serves(other)):
                found.append(replace(other, name=f"{target.name}, {name}"))
                found[-1].save(place / f"{name}.json")
    return found


def _lines(document: Mapping[str, Any], target: str) -> list[str]:
    rows, known = document["rows"], {m: kept for m, kept in document["kept_by_minutes"].items() if kept is not None}
    times = []
    for name, seconds in document["seconds"].items():
        kind, _, minutes = name.partition(" ")
        if kind == "left":
            continue
        after = f" after {minutes} minutes" if kind == "evaluation" and float(minutes) else ""
        times.append(f"{_TIMES.get(kind, kind)}{after} {seconds / 60:.1f} min")
    keep = document["keep"]
    shown = rows if keep is None else sorted(rows, key=lambda row: row["request_speedup"] or 0.0)
    lines = ["kept: worst score, compared with the model before", "", *figures(kept_columns(rows), shown), ""]
    lines.append(f"time: {', '.join(times)}")
    if known:
        kept = ", ".join(f"{share:.1%} after {float(minutes):g} minutes" for minutes, share in known.items())
        found = document["speedup_that_keeps"].items()
        reach = (f"{share} at {f'{speedup:.2f}x' if speedup else 'no speed-up'}" for share, speedup in found)
        lines += [f"{target} keeps {kept}", f"requests keep {', '.join(reach)}"]
    else:
        lines.append("every score of full depth is 0, so there is no share to keep: tune the model at full depth first")
    if keep is not None:
        best = fastest_that_keeps(rows, keep)
        told = (
            "none is faster than full depth"
            if best is None
            else "{name}, {request_speedup:.2f} times as fast, keeps {kept:.1%}"
        )
        lines.append(f"recommended to keep {keep:.0%}: {told.format_map(best or {})}")
    if len(losses := document["dev_loss"]) > 1:
        (_, before), (minutes, after) = losses[(len(losses) - 1) // 2], losses[-1]
        gain = f"their second half brought {before - after:.3f}"
        lines.append(f"dev loss {after:.3f} after {minutes:.1f} minutes of tuning; {gain}")
    return lines
