"""Both evaluations of `prepare`: full depth, the schedule and its neighbours, before and after tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import Json
from skipdecode.data.source import load_records, read_file
from skipdecode.data.tasks import Task
from skipdecode.engine.opening import load
from skipdecode.evaluation.compare import with_kept
from skipdecode.evaluation.evaluate import AnySchedule, evaluate
from skipdecode.evaluation.metrics import EncoderOptions
from skipdecode.generation.llm import LLM
from skipdecode.generation.speed import squeezed
from skipdecode.learning.invented_names import COUNTED, MEASURED, Renaming, names_copied
from skipdecode.learning.prepared import MILDER, NEIGHBOURS, neighbours
from skipdecode.learning.settings import PrepareOptions
from skipdecode.learning.sources import Sources
from skipdecode.learning.stages import Evaluation, Layers
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import fit_of, temporary_fit
from skipdecode.models.loading.checkpoint import LoadedModel, Model, open_checkpoint
from skipdecode.models.loading.fit_file import FitFile
from skipdecode.schedule import Schedule

_SPEEDS = ("request_speedup", "decode_speedup", "request_speedup_interval", "request_speedup_alone")
_NAMED = 32  # records whose names are exchanged, to see whether names are copied
_WITHIN_REACH = 2 / 3  # kept before tuning; half an hour brought 67% of E2E to 99.8%


@dataclass(frozen=True)
class ScheduleEvaluation:
    """Evaluates schedules of a model, or of its tuned checkpoint, on the test records or prompts of the sources.

    `shares`: of the nominal gain of the target, those of its neighbours before tuning.
    """

    settings: PrepareOptions
    sources: Sources
    loaded: LoadedModel
    shares: Mapping[str, float]
    out: Path
    fit: Path

    def run(
        self,
        layers: Layers,
        target: Schedule,
        until: float,
        before: Evaluation | None = None,
        tuned: Path | None = None,
    ) -> Evaluation:
        """Evaluate full depth, a schedule and its neighbours: of the tuned checkpoint, or of the model with the fit.

        The evaluation `before` says on how many records, and has the speeds that are not measured for lack of time.
        """
        if before is not None:
            layers = replace(layers, size=replace(layers.size, records=before.rows[0]["records"]))
        file, model = self.fit / FIT_FILE, self.loaded.model
        with temporary_fit(model, FitFile(file).load(model) if file.is_file() else fit_of(model)):
            rows = self._rows(LLM(self.loaded), layers, target, until, tuned)
        if before is not None:
            speeds = {row["name"]: {name: row[name] for name in _SPEEDS} for row in before.rows}
            rows = [row | speeds.get(row["name"], {}) | {n: v for n, v in row.items() if v is not None} for row in rows]
        return Evaluation(rows)

    def _rows(self, llm: LLM, layers: Layers, target: Schedule, until: float, tuned: Path | None) -> list[Json]:
        settings, size, directory = self.settings, layers.size, tuned or self.fit
        shares = NEIGHBOURS if tuned else self.shares
        # If there is time for one alone, it is the one most likely to keep the share.
        schedules = neighbours(target, directory, shares)[:: -1 if shares is MILDER else 1]
        schedules = schedules if size.neighbours else schedules[:1]
        task = None if settings.self and not settings.task else self.sources.task(2 * target.seq_len)
        options: dict[str, Any] = {"limit": size.records, "batch_size": settings.batch, "w8a8": True}
        options |= {"speed_batches": size.speed_batches, "speed_rounds": size.speed_rounds}
        if task is None:
            options |= {"base": llm, "speed_tokens": layers.request_tokens}
            options |= {"max_new_tokens": max(1, round(settings.self_tokens * size.tokens))}
            options |= {"temperature": settings.self_temperature, "top_p": settings.self_top_p}
            share = options["max_new_tokens"] / layers.request_tokens
            schedules = [squeezed(schedule, share) for schedule in schedules]  # else cut texts look better
        model = llm if tuned is None else LLM(load(open_checkpoint(tuned)))
        rows = self.scored(model, schedules, directory.name, until, task, **options)
        return rows if task is None else self._with_names(rows, model, schedules[0], task)

    def _with_names(self, rows: list[Json], llm: LLM, target: Schedule, task: Task) -> list[Json]:
        """The rows; those of full depth and the target with the share of invented names that they copy."""
        known = read_file(self.sources.known, task.template, skip_bad=True).spread(COUNTED).items
        renaming = Renaming.of(known, task.template, self.settings.seed, MEASURED)
        file = load_records(task, self.sources.test, skip_bad=self.settings.skips_bad).spread(_NAMED)
        named = tuple(renaming.others(file.items))
        if not named:
            return rows
        schedules, file = (Schedule.full(llm.num_layers), target), replace(file, items=named)
        names = {s.name: names_copied(llm, s, task, file, renaming.common) for s in schedules}
        return [row | {"names_copied": names.get(row["name"])} for row in rows]

    def scored(
        self, model: Model, schedules: Sequence[AnySchedule], name: str, until: float, task: Task | None, **options: Any
    ) -> list[Json]:
        """Evaluate schedules on the test records, or without a task on own texts; results are in eval-`name` too."""
        settings = self.settings
        if task is None:
            options |= {"prompts": self.sources.test}
        else:
            options |= {"data": self.sources.test, "task": task, **asdict(settings.part(EncoderOptions))}
        return evaluate(
            model,
            schedules=schedules,
            out=self.out / f"eval-{name}",
            until=until,
            teacher_forced=False,
            overwrite=True,
            spread=True,
            bad_records=settings.bad_records,
            **options,
        ).rows

    def to_tune(self, target: Schedule, before: Evaluation) -> Schedule:
        """The target, or of milder schedules the fastest that may keep the share after tuning."""
        if self.shares is NEIGHBOURS:
            return target
        kept = {row["name"]: row["kept"] for row in with_kept(before.rows)}
        every = neighbours(target, self.fit, self.shares)
        known = sorted((s for s in every if kept.get(s.name) is not None), key=lambda s: -s.nominal_speedup)
        if not known:
            return target
        return next((s for s in known if kept[s.name] >= _WITHIN_REACH), known[-1])
