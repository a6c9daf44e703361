"""`skipdecode.prepare`: from records or prompts to a fast checkpoint by one clock, with an evaluation of the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields
from functools import partial
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from skipdecode.common.environment import isolated_torch
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import PREPARED_FILE, heading, json_line
from skipdecode.common.plain import as_records
from skipdecode.common.progress import note
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.model import CostModel
from skipdecode.cost.source import find_cost, read_cost
from skipdecode.data.examples import Example, RecordOptions, Source, encode_source, make_template, read_sources
from skipdecode.data.forms import PromptForm
from skipdecode.engine.opening import load
from skipdecode.evaluation.compare import with_kept
from skipdecode.evaluation.evaluate import evaluate
from skipdecode.evaluation.metrics import MetricOptions
from skipdecode.evaluation.pictures import kept_charts, save_charts
from skipdecode.generation.llm import LLM
from skipdecode.learning.calibrate import SCHEDULE_FILE, calibrate
from skipdecode.learning.goal import prompt_sets, suited
from skipdecode.learning.prepared import MILDER, NEIGHBOURS, TIMES, Prepared, neighbours, squeezed, tuned_directory
from skipdecode.learning.settings import (
    PREPARE_DIRECTORY,
    PREPARE_JOURNAL,
    PROMPTS_FILE,
    CalibrationSettings,
    FitOptions,
    PrepareOptions,
)
from skipdecode.learning.sources import Sources
from skipdecode.learning.stages import EVALUATIONS, SHARES, TYPICAL, Pace, Stages
from skipdecode.learning.tune import tune
from skipdecode.models.carried import FIT_FILE
from skipdecode.models.fit import own_fit_kept
from skipdecode.models.loading.base_weights import checkpoint_digest, put_fit
from skipdecode.models.loading.card import PICTURE_FILE
from skipdecode.models.loading.hub import LoadedModel, Model, ref_of
from skipdecode.schedule import Schedule

_OUTPUTS = (SCHEDULE_FILE, FIT_FILE, "config.json", "adapter_config.json", "*.safetensors")
_SOME_TUNING = 0.1  # of the minutes: with less, nothing is tuned, and more minutes are recommended
_MORE = 1.5  # times what the other stages took
_WITHIN_REACH = 2 / 3  # kept before tuning; half an hour brought 67% of E2E to 99.8%
_AIM_FILE = "tuned-under.json"
_ENDING, _ALL_WAYS = 1.05, 1.7  # times the first evaluation: the last one, also of schedules with W8A8 weights
_LOADS = 3  # times the loading of the model: it is copied and saved for tuning, and loaded for the last evaluation
_BEFORE = "SmolLM2-135M kept 99.8% of E2E at 2.5x after 30 minutes"  # results/ready-smollm2-135m.json
_SOME_RECORDS = 64  # to see how long texts are
_SOME_POSITIONS = 64  # to see whether a speed-up is possible at all
_PACE, _CANDIDATES, _BATCH = 75, 3, 4


@isolated_torch()
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
    train, dev : str, Path or records, optional
        Records to learn from, and records that select the best weights, as for `skipdecode.tune`.
        Without `dev`, every tenth record of `train` is held out. Without both, the model learns its own answers to
        `prompts` at full depth.
    test : str, Path or records, optional
        Records to evaluate on. Default: `dev`. For own answers without a task: a file of prompts. Default: prompts
        that are not learned from.
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
    PREPARE_DIRECTORY.check(place)
    train, dev, test, prompts = map(as_records, (train, dev, test, prompts))
    if prompts is not None and not isinstance(prompts, str | Path):
        write_whole(place / PROMPTS_FILE, b"".join(map(json_line, map(PromptForm().row, prompts))))
        prompts = place / PROMPTS_FILE
    settings = PrepareOptions(prompts=None if prompts is None else str(prompts), **options)
    sources = {name: one for name, one in (("train", train), ("dev", dev), ("test", test)) if one}
    return _Run(settings, model, sources, cost, place).run(started)


class _Run:
    """The arguments of `prepare`, and its stages. Wrong options and records are refused before any work."""

    def __init__(
        self,
        settings: PrepareOptions,
        model: Model,
        sources: Mapping[str, Source],
        cost: CostModel | str | Path | None,
        out: Path,
    ) -> None:
        self.settings, self.cost, self.out, self.fit = settings, cost, out, out / "fit"
        self.target = settings.target_speedup or settings.TARGET
        self.shares = MILDER if settings.keep is not None and settings.target_speedup is None else NEIGHBOURS
        self.times = {name: share for name, share in SHARES.items() if settings.self or name != "answers"}
        self.ending = _ENDING if settings.keep is None else _ALL_WAYS  # of the first evaluation's time, the last one's
        depths = CalibrationSettings(target_speedup=self.target, prompt_depths=settings.prompt_depths)
        layers = ref_of(model).num_layers
        self.prompt_sets = prompt_sets(suited(depths, ref_of(model).config), layers)
        for speedup in settings.sampled_speedups:
            Schedule.from_speedup(layers, speedup, _SOME_POSITIONS)
        if isinstance(cost, str | Path):
            read_cost(cost)
        self.sources = Sources(settings, sources, out)
        loaded = getattr(model, "loaded", model)
        # All stages share this model: `calibrate` and `tune` copy its weights where they need another type or change
        # them. A tuned checkpoint is loaded from its files.
        begun = time.perf_counter()
        self.loaded: LoadedModel = loaded if isinstance(loaded, LoadedModel) else load(ref_of(model))
        self.loads = _LOADS * (time.perf_counter() - begun)

    # ------------------------------------------------------------------ stages

    def run(self, started: float) -> Prepared:
        settings, out, minutes = self.settings, self.out, f"{self.settings.minutes:g}"
        kept = {name: value for name, value in asdict(settings).items() if name not in ("minutes", "keep", "prompts")}
        kept |= {"ways": settings.keep is not None, "cost": self.cost and str(self.cost), "model": self.loaded.name}
        kept |= {"files": self.sources.digests}
        kept |= {"checkpoint": checkpoint_digest(self.loaded) | {"fit": None}}  # the run makes its own
        tuned = tuned_directory(out, settings.minutes)
        with closing(Stages(out / PREPARE_JOURNAL, kept, _OUTPUTS)) as stages:

            def seconds(name: str) -> float:
                """The share of a stage of the time that is left: one that takes longer shortens those that follow."""
                earlier = sum(list(self.times.values())[: [*self.times].index(name)])
                return self.times[name] / (1 - earlier) * (60 * settings.minutes - stages.spent(started))

            note(self._plan())
            data = {} if settings.self else self.sources.given(self.loaded)
            if settings.minutes and not stages.finished():
                width = ModelGeometry.from_config(self.loaded.ref.config).hidden_size
                pace = Pace.of(self.loaded.model, self._examples(data) if data else [TYPICAL])
                enough = pace.enough(width, 2 + 5 * (settings.keep is not None))
                if settings.minutes < enough:
                    note(f"{minutes} minutes may be too few to tune: about {ceil(enough)} leave a third at this speed")
            if settings.self:
                most = seconds("answers") if settings.minutes else None
                data = stages.run("answers", lambda: self.sources.answers(self.loaded, most))
            sizes = stages.run("sizes", lambda: self._sizes(data, seconds("layers"))) if settings.minutes else {}
            layers = stages.run("layers", lambda: self._chosen(data, sizes, seconds), place=self.fit)
            of, size = layers.get("files"), layers["size"]
            target = Schedule.load(self.fit / SCHEDULE_FILE)
            before = stages.run("evaluation 0", lambda: self._evaluated(size, target), of=of)
            aim = self._aim(target, before["rows"])
            over = settings.minutes - (stages.spent(started) + self.ending * before["seconds"] + self.loads) / 60
            left = stages.run(f"left {minutes}", lambda: {"minutes": over})["minutes"]  # the same if it is resumed
            more = max(20.0, 2 * settings.minutes)
            if settings.minutes and left < _SOME_TUNING * settings.minutes:
                more = max(more, ceil(_MORE * (settings.minutes - left)))
                note(f"{minutes} minutes leave {max(0.0, left):.1f} to tune: {more:g} leave a third or more")
            elif settings.minutes:
                note(f"{left:.1f} minutes of tuning for {aim.name}")
                tune_it = partial(self._tuned, data, left, tuned, sizes["dev_records"], aim)
                run = stages.run(f"tuning {minutes}", tune_it, place=tuned, of=of)
                stages.run(f"evaluation {minutes}", lambda: self._evaluated(size, aim, tuned), of=[of, run["result"]])
            document = self._document(stages.finished(), aim.name) | {"more_minutes": more}
        ready = Prepared(document, out, self.loaded)
        document["use"] = ready.use
        write_whole(out / PREPARED_FILE, json.dumps(document, indent=1) + "\n")
        charts = kept_charts(document["rows"], document["kept_by_minutes"], aim.name, Path(self.loaded.name).name)
        save_charts(charts, out / PICTURE_FILE)
        ready.write_card(self.sources.datasets)
        return ready

    def _plan(self) -> str:
        """The stages, with their minutes."""
        if not (minutes := self.settings.minutes):
            return "plan: choosing layers and an evaluation, without limit; no tuning"
        told = "".join(f"{TIMES.get(name, name)} up to {minutes * most:.1f} min, " for name, most in self.times.items())
        return f"plan: {told}tuning the other {minutes * (1 - sum(self.times.values())):.1f} min or more; {_BEFORE}"

    def _sizes(self, data: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The speed of the model on the records, and the options of `calibrate` that fit into its time."""
        settings, loaded, start, examples = self.settings, self.loaded, time.perf_counter(), self._examples(data)
        pace, width = Pace.of(loaded.model, examples), ModelGeometry.from_config(loaded.ref.config).hidden_size
        length, cost = round(fmean(len(example.prompt) for example in examples)), None
        if self.cost is None:  # here, so that what it takes is left out of the search
            cost = find_cost(loaded, batch=settings.batch, prompt_len=length).cost.to_dict()
        return {
            "pace": asdict(pace),
            "cost": cost,
            "layers": pace.search(seconds - (time.perf_counter() - start), width, len(self.prompt_sets)),
            "dev_records": pace.dev_records(60 * settings.minutes),
        }

    def _examples(self, data: Mapping[str, Any]) -> list[Example]:
        options = RecordOptions(**{n: value for n, value in self._shared(data).items() if n != "seed"})
        template = make_template(options)
        (file,) = read_sources({"train": data["train"]}, template, {"train": _SOME_RECORDS}, skip_bad=True).values()
        return encode_source(file, "train", template, self.loaded, options)[0]

    def _evaluation(self, sizes: Mapping[str, Any], layers: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The size of each of two evaluations."""
        settings = self.settings
        if not sizes:
            return EVALUATIONS[0] | {"records": settings.test_records}
        target, gains = layers["verdicts"][-1], [1.0, *self.shares.values()]
        gains = gains[::-1] if self.shares is MILDER else gains  # as in `_rows`
        cost = CostModel.from_dict(layers["cost"])
        prompts = cost.prompts_seconds(Schedule.full(cost.num_layers), layers["prompt_len"])
        return Pace(**sizes["pace"]).evaluation(
            seconds / (1 + self.ending),
            (prompts, max(0.0, layers["seconds_per_batch"] - prompts)),
            cost.batch,
            settings.test_records,
            [1 + (target["request_speedup"] - 1) * gain for gain in (0.0, *gains)],
            settings.self and not settings.task,
            settings.keep is not None,
        )

    def _shared(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Options of both `calibrate` and `tune`."""
        settings = self.settings
        # An answer may be a token longer when it is read again, and then exceed the context.
        bad_records = "skip" if settings.self else settings.bad_records
        shared: dict[str, Any] = {"seed": settings.seed, "max_length": settings.max_length, "bad_records": bad_records}
        return shared | dict(data["form"])

    def _chosen(
        self, data: Mapping[str, Any], sizes: Mapping[str, Any], seconds: Callable[[str], float]
    ) -> dict[str, Any]:
        """Choose the layers, fit the maps that replace them, and size the evaluations of them."""
        settings = self.settings
        names = ("method", "prompt_depths", *(field.name for field in fields(FitOptions)))
        options = {name: getattr(settings, name) for name in names} | {
            "records": settings.order_records,
            "target_speedup": self.target,
        }
        cost = CostModel.from_dict(sizes["cost"]) if sizes.get("cost") else self.cost
        found = calibrate(
            self.loaded,
            data["train"],
            out=self.fit,
            cost=cost,
            **self._shared(data),
            **options | dict(sizes.get("layers", {})),
            batch=settings.batch if cost is None else 1,
            held_out=0,  # the evaluation says more
            baselines=False,
            candidates=_CANDIDATES,
        )
        document = dict(found.document)
        size = self._evaluation(sizes, document, seconds("evaluation"))
        new_tokens = sizes["pace"]["text_tokens"] - document["prompt_len"] if sizes else 1
        return document | {"size": size | {"speed_tokens": max(1, round(new_tokens))}}

    def _aim(self, target: Schedule, rows: Sequence[Mapping[str, Any]]) -> Schedule:
        """The schedule to tune: the target, or of milder ones the fastest that may keep the share after tuning."""
        if self.shares is NEIGHBOURS:
            return target
        kept = {row["name"]: row["kept"] for row in with_kept(rows)}
        every = neighbours(target, self.fit, self.shares)
        known = sorted((s for s in every if kept.get(s.name) is not None), key=lambda s: -s.nominal_speedup)
        if not known:
            return target
        return next((s for s in known if kept[s.name] >= _WITHIN_REACH), known[-1])

    def _tuned(
        self, data: Mapping[str, Any], minutes: float, place: Path, dev_records: int, aim: Schedule
    ) -> dict[str, Any]:
        """Tune from the fit; own answers are distilled from full depth."""
        settings = self.settings
        rate = settings.FULL_RATE if settings.full else settings.RATE
        others, nominal = settings.sampled_speedups, aim.nominal_speedup
        aim.save(file := self.fit / _AIM_FILE)
        found = tune(
            self.loaded,
            data["train"],
            data["dev"],
            out=place,
            schedule=file,
            minutes=minutes,
            resume=True,
            **self._shared(data),
            sampled_speedups=(*others, *[nominal] * len(others)),  # the target as often as all others together
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

    def _evaluated(self, size: Mapping[str, Any], target: Schedule, tuned: Path | None = None) -> dict[str, Any]:
        """Rows of full depth, a schedule and its neighbours: of the tuned checkpoint, or of the model with the fit."""
        with own_fit_kept(self.loaded.model):
            if (file := self.fit / FIT_FILE).is_file():
                put_fit(self.loaded.model, file)
            return {"rows": self._rows(LLM(self.loaded), size, target, tuned)}

    def _rows(self, llm: LLM, size: Mapping[str, Any], target: Schedule, tuned: Path | None) -> list[dict[str, Any]]:
        settings, place, shares = self.settings, tuned or self.fit, NEIGHBOURS if tuned else self.shares
        asked: dict[str, Any] = {"batch_size": settings.batch, "bad_records": settings.bad_records}
        weights = "all" if tuned or not settings.minutes else "full"
        asked |= {
            "ways": "" if settings.keep is None else weights,
            "limit": size["records"],
            **{name: size[name] for name in ("speed_batches", "speed_rounds")},
        }
        asked |= {"teacher_forced": False, "overwrite": True, "out": self.out / f"eval-{place.name}"}
        if settings.self and not settings.task:
            asked |= {
                "prompts": self.sources.test,
                "max_new_tokens": max(1, round(settings.self_tokens * size["tokens"])),
                "speed_tokens": size["speed_tokens"],
            }
            asked |= {"temperature": settings.self_temperature, "top_p": settings.self_top_p, "base": llm}
        else:
            asked |= {"data": self.sources.test, "task": self.sources.task(2 * target.seq_len)}
            asked |= asdict(settings.part(MetricOptions))
        # If there is time for one alone, it is the one most likely to keep the share.
        schedules = neighbours(target, place, shares)[:: -1 if shares is MILDER else 1]
        schedules = schedules if size["neighbours"] else schedules[:1]
        if (share := asked.get("max_new_tokens", 1) / asked.get("speed_tokens", 1)) < 1:  # else cut texts look better
            schedules = [squeezed(schedule, share) for schedule in schedules]
        return evaluate(tuned or llm, schedules=schedules, **asked).rows

    # ------------------------------------------------------------------ results

    def _document(self, stages: Mapping[str, Any], target: str) -> dict[str, Any]:
        """All rows by minutes with the share of full depth's scores that each keeps, and the gain of the minutes."""
        split = {name: name.partition(" ")[::2] for name in stages}
        every = {float(of): stages[name]["rows"] for name, (kind, of) in split.items() if kind == "evaluation"}
        rows = with_kept([{"minutes": minutes, **row} for minutes, found in sorted(every.items()) for row in found])
        asked = f"{self.settings.minutes:g}"  # as stages are called
        shown = float(asked) if float(asked) in every else 0.0
        return heading("prepared") | {
            "model": self.loaded.name,
            "minutes": shown,
            "keep": self.settings.keep,
            "target": target,
            **{key: {name: stage[key] for name, stage in stages.items()} for key in ("seconds", "cpu_seconds")},
            "rows": [row for row in rows if row["minutes"] in (0.0, shown)],
            "kept_by_minutes": {row["minutes"]: row["kept"] for row in rows if row["name"] == target},
            "dev_loss": stages.get(f"tuning {asked}", {}).get("dev_loss", []),
        }
