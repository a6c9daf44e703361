"""`skipdecode.prepare`: from records or prompts to a fast checkpoint by one clock, with an evaluation of the result."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from skipdecode.common.environment import isolated_torch
from skipdecode.common.files import write_whole
from skipdecode.common.plain import as_records
from skipdecode.common.progress import note
from skipdecode.cost.model import CostModel
from skipdecode.cost.source import find_cost
from skipdecode.data.examples import Example, encode_source, make_template
from skipdecode.data.source import Source, prompt_lines, read_file
from skipdecode.engine.opening import load, open_fast
from skipdecode.errors import DataError, TargetError, UsageError
from skipdecode.generation.llm import LLM
from skipdecode.learning.calibrate import SCHEDULE_FILE, calibrate, checked_cost
from skipdecode.learning.clock import Clock
from skipdecode.learning.goal import goal_of_records, suited
from skipdecode.learning.pace import TYPICAL, Pace
from skipdecode.learning.prepared import FULL, MILDER, NEIGHBOURS, TIMES, Prepared, results_document, tuned_directory
from skipdecode.learning.request_target import target_of_steps
from skipdecode.learning.schedule_evaluation import ScheduleEvaluation
from skipdecode.learning.search import groups_by_fit
from skipdecode.learning.settings import (
    PREPARE_DIRECTORY,
    PROMPTS_FILE,
    WHOLE,
    CalibrationSettings,
    FitOptions,
    PrepareOptions,
)
from skipdecode.learning.sources import Sources
from skipdecode.learning.stage_log import Stages
from skipdecode.learning.stages import Evaluation, FullDepth, Layers, LearningRecords, Timing, Tuning, TuningPlan
from skipdecode.learning.tune import Tuned, tune
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.checkpoint import Model, loaded_of, open_checkpoint
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.schedule import Schedule

_TUNED_UNDER = "tuned-under.json"
# results/ready-smollm2-135m.json, results/prepare-e2e-qwen2.5-coder-0.5b.json
_BEFORE = "of E2E, SmolLM2-135M kept 99.8% at 2.5x after 30 minutes, Qwen2.5-Coder-0.5B 98.0% at 2.5x after 45"
_SOME_RECORDS = 64  # to see how long texts are
_SOME_POSITIONS = 64  # to see whether a speed-up is possible at all
_CHECKPOINT_EVERY, _BATCH_SIZE = 75, 4
_EVALUATIONS = 5  # of the dev records, in a tuning
_TO_LEARN = 0.02  # of the dev loss: if the first steps at full depth take off less, the checkpoint does the task
_LEAST_STEPS = 10  # of a tuning at full depth, and between two evaluations
_TUNES_OF_FULL = 0.9  # of the minutes at full depth; the model is saved and scored in the others
_SCORED = 16  # records, to see what the checkpoint did before


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
    overwrite: bool = False,
    started: float | None = None,
    **options: Any,
) -> Prepared:
    """Make a model fast: tune it at full depth if that pays, choose layers and a fit, and distil it under the schedule.

    The model at full depth, which the result is compared with, is saved in `out`/full if it was tuned. Its greedy
    answers are what the schedule learns, or the responses of the records where these teach more. Without records
    it answers `prompts`. The same call continues an interrupted one. With other `minutes`, the layers and the fit are
    reused, and the results compared; the model at full depth is tuned anew if its loss was still falling.

    Parameters
    ----------
    model : LLM, LoadedModel, str or Path
        A model that is loaded, which stays as it is, or a name as for `skipdecode.load`.
    train, dev : str, Path or records, optional
        Records to learn from, and records that select the best weights, as for `skipdecode.tune`.
        Without `dev`, every tenth record of `train` is held out.
    test : str, Path or records, optional
        Records to evaluate on. Default: `dev`. For own answers without a task: a file of prompts. Default: prompts
        that are not learned from.
    prompts : str, Path or list of str, optional
        For own answers: a file of prompts, or prompts. Default: the model draws them, by its chat template.
    cost : CostModel, str or Path, optional
        Cost of a step; see `skipdecode.calibrate`.
    out : str or Path
        Directory for all results.
    overwrite : bool
        Begin anew in a directory that has the results of another call, or of this one.
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
    directory = Path(out)
    PREPARE_DIRECTORY.check(directory, overwrite=overwrite)
    train, dev, test, prompts = map(as_records, (train, dev, test, prompts))
    if prompts is not None and not isinstance(prompts, str | Path):
        write_whole(directory / PROMPTS_FILE, prompt_lines(prompts))
        prompts = directory / PROMPTS_FILE
    settings = PrepareOptions(prompts=None if prompts is None else str(prompts), **options)
    sources = {name: source for name, source in (("train", train), ("dev", dev), ("test", test)) if source}
    return _Run(settings, model, sources, cost, directory).run(started, overwrite)


class _Run:
    """The arguments of `prepare`, and its stages. Wrong options and records are refused before any work.

    `loaded`: the model of all stages, until `_full_depth` puts the model that it has tuned in its place.
    """

    def __init__(
        self,
        settings: PrepareOptions,
        model: Model,
        sources: Mapping[str, Source],
        cost: CostModel | str | Path | None,
        out: Path,
    ) -> None:
        self.settings, self.cost, self.out = settings, cost, out
        self.fit_directory, self.full_directory = out / "fit", out / FULL
        if settings.quantization != "none" and cost is not None:
            raise UsageError("`quantization` counts by a measurement: leave out `cost`")
        self.target = settings.target_speedup or settings.TARGET
        self.shares = MILDER if settings.keep is not None and settings.target_speedup is None else NEIGHBOURS
        depths = CalibrationSettings(target_speedup=self.target, prompt_depths=settings.prompt_depths)
        checkpoint = open_checkpoint(model)
        layers = checkpoint.num_layers
        self.depths = suited(depths, checkpoint.config)
        for speedup in settings.sampled_speedups:
            Schedule.from_speedup(layers, speedup, _SOME_POSITIONS)
        self.cost_model = None if cost is None else checked_cost(cost, layers)
        self.sources = Sources(settings, sources, out)
        # All stages share this model, or the one tuned at full depth that takes its place: `calibrate` and `tune` copy
        # its weights where they need another type or change them.
        begun = time.perf_counter()
        self.loaded = loaded_of(model) or load(checkpoint)
        self.name, self.loading = self.loaded.checkpoint.name, time.perf_counter() - begun
        if settings.quantization != "none":
            open_fast(self.loaded.model, "fast", note, settings.quantization)  # says what it needs

    def run(self, started: float, overwrite: bool) -> Prepared:
        settings, out, minutes = self.settings, self.out, self.settings.minutes
        with closing(Stages(out, self._depends_on(), started, overwrite=overwrite)) as stages:
            clock = Clock(stages, minutes, settings.self, self.loading)
            note(self._plan(clock))
            records, full = self._texts(stages, clock)
            pace = self._pace(stages, records) if minutes else None
            try:
                timing = None
                if pace is not None:
                    timing = stages.run(Timing, lambda: self._timing(records, pace, clock.until(Layers.label)))
                choose = partial(self._layers, records, pace, timing, clock)
                learned = full and full.scores and asdict(full)
                layers = stages.run(Layers, choose, directory=self.fit_directory, reads=learned)
            except (TargetError, UsageError, DataError):
                stages.forget()
                raise
            fit_digests = stages.done(Layers).files
            target = Schedule.load(self.fit_directory / SCHEDULE_FILE)
            evaluation = self._evaluation
            evaluate_first = partial(evaluation.run, layers, target, clock.until(Evaluation.label))
            before = stages.run(Evaluation, evaluate_first, minutes=0.0, reads=fit_digests)
            schedule = evaluation.to_tune(target, before)
            left = TuningPlan(0.0)
            if pace is not None:
                seconds = stages.done(Evaluation, 0.0).seconds
                left = stages.run(TuningPlan, lambda: TuningPlan(clock.minutes_to_tune(seconds)), minutes=minutes)
            if pace is not None and not left.is_too_short(minutes):
                note(f"{left.minutes:.1f} minutes of tuning for {schedule.name}")
                directory = tuned_directory(out, minutes)
                work = partial(self._tuned, records, left, directory, pace, schedule)
                tuning = stages.run(Tuning, work, minutes=minutes, directory=directory, reads=fit_digests)
                evaluate_last = partial(evaluation.run, layers, schedule, clock.end, before, directory)
                stages.run(Evaluation, evaluate_last, minutes=minutes, reads=[fit_digests, tuning.result])
            elif minutes:
                note(f"{minutes:g} minutes leave {max(0.0, left.minutes):.1f} to tune")
            document = results_document(settings, self.name, schedule, left.minutes, full, stages)
        prepared = Prepared(document, out, self.loaded)
        document["use"] = prepared.use
        prepared.save(self.sources.datasets)
        return prepared

    def _depends_on(self) -> dict[str, Any]:
        """All that the stages depend on, JSON-ready; other minutes share most stages."""
        settings = self.settings
        fixed = {name: value for name, value in asdict(settings).items() if name not in ("minutes", "keep", "prompts")}
        fixed |= {"milder": self.shares is MILDER, "cost": self.cost and str(self.cost), "model": self.name}
        fixed |= {"files": self.sources.digests}
        return fixed | {"checkpoint": checkpoint_digest(self.loaded) | {"fit": None}}  # the run makes its own

    def _plan(self, clock: Clock) -> str:
        """The stages, with their minutes."""
        if not (minutes := self.settings.minutes):
            return "plan: choosing layers and an evaluation, without limit; no tuning"
        ends = [f"{TIMES.get(name, name)} up to {minutes * most:.1f} min" for name, most in clock.shares.items()]
        tuning = minutes * (1 - sum(clock.shares.values()) - clock.shares[Evaluation.label])
        return f"plan: {', '.join(ends)} (twice), tuning the other {tuning:.1f} min or more; {_BEFORE}"

    @property
    def _evaluation(self) -> ScheduleEvaluation:
        return ScheduleEvaluation(self.settings, self.sources, self.loaded, self.shares, self.out, self.fit_directory)

    @property
    def width(self) -> int:
        """hidden_size of the model."""
        return int(self.loaded.checkpoint.config.get_text_config(decoder=True).hidden_size)

    def _texts(self, stages: Stages, clock: Clock) -> tuple[LearningRecords, FullDepth | None]:
        """What the schedule learns: the model's answers, or responses that still teach; and the tuning before."""
        responses = None if self.settings.self else self.sources.written_records(self.loaded)
        if (minutes := self.settings.minutes) and not stages.finished():
            pace = Pace.of(self.loaded.model, [TYPICAL]) if responses is None else self._pace(stages, responses)
            if minutes < (enough := pace.enough(self.width)):  # said before any work
                few = f"{minutes:g} minutes may be too few to tune"
                note(f"{few}: about {ceil(enough)} leave half of them at this speed")
        if responses is None:
            until = clock.until(LearningRecords.label)
            work = partial(self.sources.self_generate, self.loaded, until)
            return stages.run(LearningRecords, work, directory=self.out / "answers"), None
        full = self._full_depth(stages, responses, clock)
        if full is None or full.learns_responses:
            return self.sources.with_invented_names(responses), full
        work = partial(self.sources.answer_records, responses, self.loaded, clock.until(LearningRecords.label))
        return stages.run(LearningRecords, work, directory=self.out / "answers", reads=asdict(full)), full

    def _pace(self, stages: Stages, records: LearningRecords) -> Pace:
        """Measure the model's speed of learning, once, on a sample of the records."""
        return stages.run(Pace, lambda: Pace.of(self.loaded.model, self._sample(records)))

    def _sample(self, records: LearningRecords) -> list[Example]:
        """Records from all over the file, for lengths and speeds."""
        template = make_template(records.options)
        file = read_file(records.train, template, skip_bad=True).spread(_SOME_RECORDS)
        return encode_source(file, "train", template, self.loaded, records.options)[0]

    def _full_depth(self, stages: Stages, responses: LearningRecords, clock: Clock) -> FullDepth | None:
        """The tuning at full depth, whose model takes the place of the checkpoint; None if there is no time for it."""
        known, minutes = stages.find(FullDepth), self.settings.minutes
        if known is not None and known.serves(minutes):
            minutes = known.minutes
        if not minutes:
            return None
        pace, plan = self._pace(stages, responses), minutes * clock.shares[FullDepth.label] * _TUNES_OF_FULL
        if pace.steps(60 * plan, _BATCH_SIZE) < _LEAST_STEPS:
            note(f"{plan:.1f} minutes are too few to tune at full depth: the responses are learned")
            return None
        work = partial(self._tuned_at_full_depth, responses, pace, minutes, plan)
        full = stages.run(FullDepth, work, directory=self.full_directory, reads=minutes)
        if full.scores is not None:
            old = self.loaded
            dtype, device = str(old.model.dtype).removeprefix("torch."), str(old.model.device)
            tuned = load(self.full_directory, dtype=dtype, device=device, base=old.checkpoint.given_base)
            self.loaded = replace(tuned, model=merge_adapter(tuned.model))
        return full

    def _tuned_at_full_depth(self, responses: LearningRecords, pace: Pace, minutes: float, plan: float) -> FullDepth:
        """Tune for `plan` minutes at full depth, as long as each evaluation lowers the dev loss.

        A checkpoint that does the task is one whose loss the first steps do not lower clearly: no score says that alike
        for all tasks.
        """
        more = {"early_stop": _TO_LEARN, "train_fit": False}
        losses = self._tune(responses, self.full_directory, "full", plan, pace, **more).dev_losses
        first, best = losses[0][1], min(loss for _, loss in losses)
        scores = None
        if best > (1 - _TO_LEARN) * first:
            shutil.rmtree(self.full_directory)
            note(
                f"tuning at full depth lowers the dev loss from {first:.3f} to {best:.3f} only: the model does the task"
            )
        else:
            until = time.perf_counter() + 60 * plan * (1 / _TUNES_OF_FULL - 1)
            task = self.sources.task(2 * pace.longest_response)
            rows = self._evaluation.scored(LLM(self.loaded), ["full"], "checkpoint", until, task, limit=_SCORED)
            scores = dict(rows[0]["scores"])
        return FullDepth(minutes, losses, scores)

    def _timing(self, records: LearningRecords, pace: Pace, until: float) -> Timing:
        """Measure the cost of a step and of whole requests, and size the search that ends at `until`."""
        loaded, sample, cost, target = self.loaded, self._sample(records), self.cost_model, self.target
        if cost is None:
            half = (time.perf_counter() + until) / 2
            prompt_len, batch = round(pace.prompt_tokens), self.settings.batch
            cost = find_cost(loaded, batch=batch, prompt_len=prompt_len, until=half).cost
            target = target_of_steps(self.depths, cost, loaded, sample, batch, half, self.settings.quantization)
        goal = goal_of_records(replace(self.depths, target_speedup=target), cost, sample, loaded.checkpoint.config)
        groups = [len(prompts) for _, prompts in groups_by_fit(goal.prompts)]
        return Timing(cost.to_dict(), target, pace.search(until - time.perf_counter(), self.width, groups))

    def _layers(self, records: LearningRecords, pace: Pace | None, timing: Timing | None, clock: Clock) -> Layers:
        """Choose the layers, fit the maps that replace them, and size the evaluations of them."""
        settings = self.settings
        options = asdict(settings.part(FitOptions))
        options |= {"prompt_depths": settings.prompt_depths, "records": settings.order_records}
        if timing is not None:
            options |= asdict(timing.search)
        cost = self.cost_model if timing is None else CostModel.from_dict(timing.cost)
        document = calibrate(
            self.loaded,
            records.train,
            out=self.fit_directory,
            cost=cost,
            until=clock.until(Layers.label),
            **asdict(records.options),
            **options,
            seed=settings.seed,
            target_speedup=self.target if timing is None else timing.target,
            batch=settings.batch if cost is None else 1,
        ).document
        if pace is None:
            return Layers(replace(WHOLE, records=settings.test_records), 1)
        gain = document["candidates"][0]["speedup"] - 1
        speedups = [1 + gain * share for share in (0.0, 1.0, *self.shares.values())]
        seconds = 60 * settings.minutes * clock.shares[Evaluation.label]
        size = pace.evaluation(seconds, document["seconds_per_batch"], settings.batch, speedups)
        size = replace(size, records=min(size.records, settings.test_records))
        return Layers(size, max(1, round(pace.text_tokens - document["prompt_len"])))

    def _tuned(
        self, records: LearningRecords, plan: TuningPlan, directory: Path, pace: Pace, schedule: Schedule
    ) -> Tuning:
        """Tune from the fit; the model's own answers are distilled from full depth."""
        settings = self.settings
        others, nominal = settings.sampled_speedups, schedule.nominal_speedup
        schedule.save(file := self.fit_directory / _TUNED_UNDER)
        weight = float(records.own) if settings.distill_weight is None else settings.distill_weight
        # The target as often as all others together.
        speedups = (*others, *[nominal] * len(others))
        tuned = self._tune(
            records, directory, file, plan.minutes, pace, nominal, sampled_speedups=speedups, distill_weight=weight
        )
        return Tuning(dict(tuned.result), tuned.dev_losses)

    def _tune(
        self,
        records: LearningRecords,
        out: Path,
        schedule: str | Path,
        minutes: float,
        pace: Pace,
        speedup: float = 1.0,
        **more: Any,
    ) -> Tuned:
        settings = self.settings
        return tune(
            self.loaded,
            records.train,
            records.dev,
            out=out,
            schedule=schedule,
            minutes=minutes,
            **asdict(records.options),
            seed=settings.seed,
            learning_rate=settings.rate(self.width),
            batch_size=_BATCH_SIZE,
            full=settings.full,
            merge=self.loaded.checkpoint.adapter is not None and not settings.full,
            eval_every=max(_LEAST_STEPS, pace.steps(60 * minutes * speedup / _EVALUATIONS, _BATCH_SIZE)),
            checkpoint_every=_CHECKPOINT_EVERY,
            dev_records=pace.dev_records(60 * settings.minutes),
            distributions=records.distributions,
            **more,
        )
