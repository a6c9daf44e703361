"""`skipdecode.evaluate`: schedules of a model next to full depth, with references or on texts of the model."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from skipdecode.common.environment import isolated_torch
from skipdecode.common.plain import as_records
from skipdecode.common.progress import note
from skipdecode.data.chats import chat_fault
from skipdecode.data.examples import known_shape, written_turns
from skipdecode.data.prompts import context_length, prompt_room
from skipdecode.data.records import refuse_rejects
from skipdecode.data.shapes import TEXT
from skipdecode.data.source import PromptSource, load_records
from skipdecode.data.tasks import Task, load_task, task_names
from skipdecode.engine.opening import load
from skipdecode.errors import ModelLoadError, UsageError
from skipdecode.evaluation.compare import Pair, pairs_table, rows_of, runs_tables, with_kept
from skipdecode.evaluation.method_runs import with_w8a8
from skipdecode.evaluation.metrics import EncoderOptions, Metric, check_metric, make_metrics
from skipdecode.evaluation.reference_free import ReferenceFreeEvaluation, reference_free_table
from skipdecode.evaluation.results import (
    EVAL_DIRECTORY,
    EvaluationOptions,
    EvaluationSettings,
    Run,
    check_free,
    is_unfinished,
    model_about,
)
from skipdecode.evaluation.run import TaskEvaluation, note_left_out, records_that_fit
from skipdecode.generation.llm import LLM
from skipdecode.generation.speed import Method, method_name
from skipdecode.models.checkpoint_schedule import schedule_file
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, Model, open_checkpoint
from skipdecode.schedule import Schedule

_REMEDY = "give a `task`, which names their fields"
_ANSWERS = "`prompts` in place of `data` compares without references"
AnySchedule = Schedule | str | Path
Data = str | Path | Iterable[Mapping[str, Any]]
"""A JSONL or CSV file, or records."""


@dataclass(frozen=True)
class Scores:
    """Results of an evaluation. Printed, or shown in a notebook, they are tables in Markdown.

    Parameters
    ----------
    runs : sequence of Run
        The result of each schedule on records with references, in order; without references, one result of all.
    pairs : sequence of Pair
        Paired comparisons of the runs.
    texts : mapping of str to str
        The name of the schedule of each requested text.
    """

    runs: Sequence[Run]
    pairs: Sequence[Pair] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def document(self) -> dict[str, Any]:
        """All results, JSON-ready, as `skipdecode eval --json` prints them."""
        if self._is_reference_free:
            return dict(self.runs[0].data)
        return {"runs": [run.data for run in self.runs], "pairs": [pair.to_dict() for pair in self.pairs]}

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each schedule, full depth included: name, request_speedup, decode_speedup, scores, kept and more.

        `kept` is the worst score, compared with full depth, and `kept_interval` its 95% interval. Without a row of full
        depth, a row has neither.
        """
        rows = rows_of(self.document)
        return with_kept(rows) if any(row["full_depth"] for row in rows) else rows

    def __getitem__(self, schedule: str | Schedule) -> dict[str, Any]:
        """The row of a schedule, of its name, or of its text as `evaluate` was given it; raises UsageError."""
        name = schedule.name if isinstance(schedule, Schedule) else schedule
        rows = {row["name"]: row for row in self.rows}
        row_of_name = rows.get(self.texts.get(name, name))
        if row_of_name is None:
            raise UsageError(f"no schedule {name!r} was evaluated: accepted are {', '.join([*self.texts, *rows])}")
        return row_of_name

    def __str__(self) -> str:
        if self._is_reference_free:
            return reference_free_table(self.document)
        return "\n\n".join([runs_tables(self.runs), *([pairs_table(self.pairs)] if self.pairs else [])])

    def _repr_markdown_(self) -> str:
        return str(self)

    @property
    def _is_reference_free(self) -> bool:
        return "rows" in self.runs[0].data


@isolated_torch()
def evaluate(
    model: Model,
    data: Data | None = None,
    schedules: AnySchedule | Sequence[AnySchedule] = (),
    *,
    task: Task | str | Path | None = None,
    prompts: str | Path | Sequence[str] | None = None,
    base: Model | None = None,
    out: str | Path | None = None,
    loader: Callable[[Checkpoint], LLM] = lambda checkpoint: LLM(load(checkpoint)),
    until: float = math.inf,
    **options: Any,
) -> Scores:
    """Compare schedules of a model with full depth: quality, agreement and speed.

    With `data` or `task`, each schedule generates an output for each record, and references score the outputs. With
    neither, no references are needed: texts of each schedule are compared with the base model (KL divergence,
    perplexity). Decoding speed is measured for equal work, with the schedules in turn.

    Parameters
    ----------
    model : LLM, LoadedModel, str or Path
        A model that is loaded, or a name as for `skipdecode.load`.
    data : str, Path or records, optional
        A file, mappings or a table, as for `skipdecode.tune`. Default with a task: the task's data set.
    schedules : Schedule or str, or a list of them
        Schedules, or their texts (`skipdecode.schedule.grammar`), such as "2x:p15"; full depth runs beside them.
        Default: the checkpoint's own, else full depth.
    task : Task, str or Path, optional
        A task, its name or its YAML file. Default: the prompt and responses on which the checkpoint was tuned, else the
        fields "prompt" and "response".
    prompts : str, Path or list of str, optional
        Without references: a file of prompts, or prompts. Default: the model draws them, by its chat template.
    base : LLM, LoadedModel, str or Path, optional
        Without references: the model to compare with. Default: the model that `model` was tuned from.
    out : str or Path, optional
        Directory for results (``run.json``, ``outputs.jsonl``); several schedules, given as a list, have a directory
        each in it. An interrupted evaluation continues there. Default: results are only returned.
    loader : callable
        Loads a model that is given by name.
    until : float
        Reading of `time.perf_counter()` after which no further record is begun; those that are finished count.
    **options
        Fields of `skipdecode.evaluation.results.EvaluationOptions`: limit, metrics, batch_size, max_new_tokens, …

    Raises
    ------
    UsageError, ScheduleError
        An option or a schedule is not accepted.
    DataError
        A record cannot be used.
    ModelLoadError
        The model, or a metric's model, cannot be loaded.
    OutputError
        `out` has results already, and `overwrite` is not set.
    """
    data, prompts, settings = as_records(data), as_records(prompts), EvaluationOptions(**options)
    is_single = isinstance(schedules, AnySchedule)
    names: Any = [schedules] if is_single else schedules or ()
    listed = [s if isinstance(s, Schedule) else schedule_file(str(s)) for s in names]
    checkpoint = open_checkpoint(model, schedules=listed if isinstance(model, str | Path) else ())
    work = _Evaluation(model, checkpoint, listed, is_single, out is not None, loader, settings, until)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()) if out is None else out)
        if data is None and task is None:
            runs = [work.on_texts(prompts, base, directory)]
        elif prompts is not None or base is not None:
            raise UsageError(f"{'base' if prompts is None else 'prompts'} is for an evaluation without data and task")
        else:
            runs = work.on_records(data, task, directory)
        if out is None:
            for run in runs:
                _ = run.outputs  # read before the directory is deleted
    return Scores(runs, texts=work.texts)


@dataclass(frozen=True)
class _Evaluation:
    """The arguments of `evaluate` for both kinds of data."""

    model: Model
    checkpoint: Checkpoint
    schedules: Sequence[Schedule | str]
    is_single: bool  # not a list: its results have the directory for themselves
    saved: bool
    loader: Callable[[Checkpoint], LLM]
    options: EvaluationOptions
    until: float
    texts: dict[str, str] = field(default_factory=dict)  # of `Scores`

    def on_records(self, data: Data | None, task: Task | str | Path | None, out: Path) -> list[Run]:
        options, chosen = self.options, task_of(self.checkpoint, task)
        skip_bad = options.bad_records == "skip"
        shape = None if task is not None else known_shape(data, _REMEDY, _ANSWERS, chosen.template)
        is_plain = task is None and self.checkpoint.recipe.template is None
        chosen = replace(chosen, chat=chosen.chat or options.chat)
        most = options.max_new_tokens or chosen.max_new_tokens
        prompt_room(context_length(self.checkpoint.config), most)
        schedules = self._chosen(chosen.response_tokens.get("p95", most)) or [self.checkpoint.parse(None, most)]
        directories = self._directories(schedules, out)
        first = None if options.spread else options.limit
        records = load_records(chosen, data, shape=shape, skip_bad=skip_bad, limit=first)
        if options.spread:
            records = records.spread(options.limit)
        note_left_out(records.skipped)
        if task is None:
            note(f"task {chosen.name}, prompts {chosen.prompt!r}")
        metrics = self._metrics(chosen)
        llm = self._open(self.model)
        as_chats = is_plain and shape is not TEXT and chat_fault(llm.tokenizer) is None
        chosen = replace(chosen, chat=chosen.chat or as_chats)
        skipped, records = len(records.skipped), written_turns(records, chosen.template, llm.tokenizer)
        refuse_rejects("data", records.skipped[skipped:], skip_bad=skip_bad and bool(records.items))
        _check_template(llm.loaded, chosen)
        if untuned := llm.loaded.untuned_line(s for s in schedules if not s.is_full):
            note(untuned)
        note(f"engine: {llm.backend.name}")
        methods = self._methods(llm, directories, out)
        about = {
            **model_about(llm, options.name),
            "recipe": _recipe(llm.loaded),
            "data": Path(data).name if isinstance(data, str | Path) else None,
            "limit": options.limit,
        }
        settings = replace(options.part(EvaluationSettings), max_new_tokens=most)
        on = llm.loaded.model, llm.tokenizer, chosen
        records, prompts = records_that_fit(*on, records, settings, skip_bad=skip_bad)
        work = TaskEvaluation(*on, records, prompts, metrics, settings, about, self.until)
        return work.run(methods, out, overwrite=options.overwrite)

    def _metrics(self, task: Task) -> list[Metric]:
        """The metrics that are named, else the task's, of which one that cannot be computed here is left out."""
        encoder = self.options.part(EncoderOptions)
        named = bool(self.options.metrics) or encoder.bertscore_model != EncoderOptions().bertscore_model
        return make_metrics(self.options.metrics or task.metrics, encoder, None if named else note)

    def _methods(self, llm: LLM, directories: Mapping[Path, Schedule], out: Path) -> dict[Path, Method]:
        """The methods by the directories of their results: the schedules, full depth beside them, those with W8A8."""
        methods = {directory: Method(llm.backend, schedule) for directory, schedule in directories.items()}
        if self.options.full_depth and not any(method.full_depth for method in methods.values()):
            methods = {out / "full": Method(llm.backend), **methods}
        if self.options.w8a8:
            methods |= {out / _folder(m.name): m for m in with_w8a8(llm.backend, [*directories.values()])}
        return methods

    def _directories(self, schedules: Sequence[Schedule], out: Path) -> dict[Path, Schedule]:
        """The directory of each schedule's results; refuses directories that are not free."""
        directories: dict[Path, Schedule] = {}
        for schedule in schedules:
            name = method_name(schedule)
            directory = out if self.is_single or not self.schedules else out / _folder(name)
            if directory in directories:
                raise UsageError(f"the schedules have {name} twice: leave one out, or give them different names")
            directories[directory] = schedule
        # Of an unfinished run, `TaskEvaluation` checks whether it is the same: that needs the loaded model.
        if self.saved and not self.options.overwrite and not is_unfinished(out):
            wanted = [*directories, out / "full"]
            for directory in wanted:
                EVAL_DIRECTORY.check(directory)
            for directory in wanted:
                check_free(directory, overwrite=False)
        return directories

    def on_texts(self, prompts: str | Path | Sequence[str] | None, base: Model | None, out: Path) -> Run:
        options = self.options
        if options.metrics:
            raise UsageError("metrics needs records with references: give data, a task, or leave it out")
        source: PromptSource | None = None
        if isinstance(prompts, str | Path):
            source = PromptSource.open(str(prompts)).filled()
        elif prompts is not None:
            source = PromptSource.of_prompts(prompts).filled()
        requested = self._chosen(options.max_new_tokens or ReferenceFreeEvaluation.TOKENS)
        requested = requested if self.schedules else list(self.checkpoint.tuned_under)
        schedules = [schedule for schedule in requested if not schedule.is_full]
        if not schedules:
            raise UsageError("no schedule to compare with full depth: give some, such as 1.5x and 2x")
        if len(schedules) > len({schedule.name for schedule in schedules}):
            raise UsageError("two schedules have the same name: give them different names")
        check_free(out, overwrite=options.overwrite or is_unfinished(out))
        llm = self._open(self.model)
        return ReferenceFreeEvaluation(llm, self._base(llm, base), schedules, source, options, self.until).run(out)

    def _base(self, llm: LLM, base: Model | None) -> LLM:
        """The model to compare with."""
        recipe, checkpoint = llm.loaded.checkpoint.document, self.checkpoint
        tuned_from = None if recipe is None else recipe["options"].get("model")
        name = base or (tuned_from if checkpoint.adapter is None else checkpoint.base) or checkpoint.name
        if isinstance(name, str | Path) and str(name) == checkpoint.name:
            return llm
        try:
            return self._open(name)
        except ModelLoadError as e:
            raise type(e)(f"the base model: {e} (base selects another)") from None

    def _open(self, model: Model) -> LLM:
        if isinstance(model, LLM):
            return model
        if isinstance(model, LoadedModel):
            return LLM(model)
        return self.loader(self.checkpoint if model is self.model else open_checkpoint(model))

    def _chosen(self, seq_len: int) -> list[Schedule]:
        """The requested schedules."""
        chosen = []
        for requested in self.schedules:
            schedule = self.checkpoint.parse(requested, seq_len)
            if not isinstance(requested, Schedule):
                self.texts[str(requested)] = method_name(schedule)
            chosen.append(schedule)
        return chosen


def _folder(name: str) -> str:
    """The directory of a method; names of schedules are free text."""
    return re.sub(r"[^\w.-]+", "-", name).strip(".-") or "schedule"


def _recipe(loaded: LoadedModel) -> dict[str, Any] | None:
    """Schedule name, options, data and result from the recipe of the model, if it has one."""
    if (recipe := loaded.checkpoint.document) is None:
        return None
    schedule = (recipe.get("schedule") or {}).get("name")
    return {"schedule": schedule} | {name: recipe.get(name) for name in ("options", "data", "result")}


def task_of(checkpoint: Checkpoint, task: Task | str | Path | None) -> Task:
    """The task, else records in the template that the checkpoint was tuned on, else records with plain fields."""
    if isinstance(task, Task):
        return task
    template = checkpoint.recipe.template if task is None else None
    if template is None:
        return load_task(task or "jsonl", check_metric)
    alike = (name for name in task_names() if load_task(name).prompt == template.text)
    plain = load_task(next(alike, "jsonl"), check_metric)
    references = tuple(dict.fromkeys((*template.responses, *plain.references)))
    plain = replace(plain, prompt=str(template.text), references=references, chat=bool(template.chat))
    return replace(plain, truncate=template.truncate, max_prompt_tokens=template.max_prompt_tokens)


def _check_template(loaded: LoadedModel, task: Task) -> None:
    """Print a note if the model was tuned on another template: its scores would then be too low."""
    tuned = loaded.checkpoint.recipe.template
    if tuned is not None and (tuned.text, tuned.chat) != (task.prompt, task.chat):
        note(f"the model was tuned with the template {tuned.text!r}, chat={tuned.chat}; the task has another template")
