"""One evaluation: a model under a method on a task, from records to a result that can be repeated from what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from skipdecode.common.journal import KeptValues
from skipdecode.common.progress import note, progress_bar
from skipdecode.data.prompts import encode_prompts, response_ids
from skipdecode.data.records import Record, Reject
from skipdecode.data.source import Records
from skipdecode.data.tasks import Task
from skipdecode.errors import UsageError
from skipdecode.evaluation.bootstrap import Table
from skipdecode.evaluation.generate import Outputs, batches, generate_all
from skipdecode.evaluation.methods.base import Method
from skipdecode.evaluation.metrics import Metric
from skipdecode.evaluation.results import (
    RUN_FILE,
    Run,
    check_directory,
    is_unfinished,
    keep_unfinished,
    load_run,
    run_document,
    save_run,
)
from skipdecode.evaluation.scores import Scored, free_running
from skipdecode.evaluation.settings import EvaluationSettings, Subject
from skipdecode.evaluation.teacher_forced import reference_loss, teacher_forced
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = ["evaluate", "note_left_out"]


def evaluate(
    subject: Subject,
    methods: Mapping[Path, Method],
    task: Task,
    records: Records,
    metrics: Sequence[Metric],
    settings: EvaluationSettings,
    *,
    out: Path,
    config: Mapping[str, Any],
    overwrite: bool = False,
    skip_bad: bool = False,
    progress: bool = False,
) -> list[Run]:
    """Generate, score and save; the runs in the order of `methods`.

    A run that was interrupted goes on with the batches and the methods that are left. Several methods take turns on
    each batch and share full depth beside them.

    Parameters
    ----------
    methods : mapping of Path to Method
        What is evaluated, by the directory that gets its ``run.json`` and ``outputs.jsonl``.
    out : Path
        The directory that keeps finished batches until all methods are saved.
    config : mapping
        What the caller wants kept (model name, data file, a name for tables).
    overwrite : bool
        Replace runs that are in the directories already.
    skip_bad : bool
        Leave out records whose prompt is too long for the model, and say which, instead of refusing them.
    progress : bool
        Show bars.

    Raises
    ------
    SkipDecodeError
        A method that does not fit the model, prompts too long for it, results that cannot be written.
    """
    settings = _settled(subject, list(methods.values()), task, settings)
    records, prompts = _encoded(subject, task, records, settings, skip_bad)
    about = _about(config, task, records, settings)
    work = _Work(subject, task, records.items, prompts, settings, progress)
    runs = []
    with closing(_begun(out, about, methods, prompts, overwrite)) as kept:
        found = work.generate(list(methods.values()), kept)
        # Before anything is scored: a signature may be complete only afterwards.
        scored_with = [[metric.name, metric.signature] for metric in metrics]
        for (directory, method), outputs in zip(methods.items(), found, strict=True):
            if kept.get(f"saved {directory}") == scored_with and (directory / RUN_FILE).exists():
                runs.append(load_run(directory))
                continue
            scored = work.score(method, metrics, outputs)
            rows = work.rows(outputs, scored)
            data = run_document(rows, {**about, "method": method.settings()}, method, scored, outputs, settings)
            runs.append(save_run(directory, data, rows))
            kept.put(f"saved {directory}", scored_with)
        kept.remove()
    return runs


# ---------------------------------------------------------------------- steps


def _settled(
    subject: Subject, methods: Sequence[Method], task: Task, settings: EvaluationSettings
) -> EvaluationSettings:
    """The settings with what the task and the methods say; raises SkipDecodeError for a method that does not fit."""
    for method in methods:
        method.check(subject.model)
    most = min(method.max_batch or settings.batch_size for method in methods)
    return replace(
        settings,
        max_new_tokens=settings.max_new_tokens or task.max_new_tokens,
        batch_size=min(settings.batch_size, most),
    )


def _encoded(
    subject: Subject, task: Task, records: Records, settings: EvaluationSettings, skip_bad: bool
) -> tuple[Records, list[list[int]]]:
    """The records whose prompts fit, and the prompts' tokens."""
    room = None if subject.context is None else subject.context - (settings.max_new_tokens or 0)
    if room is not None and room < 1:
        raise UsageError(
            f"--max-new-tokens {settings.max_new_tokens} leaves no room for a prompt: the model's context is "
            f"{subject.context} tokens; give fewer"
        )
    fitting, prompts = encode_prompts(task.template(), records, subject.tokenizer, room=room, skip_bad=skip_bad)
    note_left_out(fitting.skipped[len(records.skipped) :])
    return fitting, prompts


def note_left_out(rejects: Sequence[Reject]) -> None:
    """Say how many records are left out, and the line and reason of the first ones; nothing if there are none."""
    if rejects:
        lines = ", ".join(f"{line} ({reason})" for line, reason in rejects[:5])
        more = " ..." if len(rejects) > 5 else ""
        noun = "record" if len(rejects) == 1 else "records"
        note(f"{len(rejects)} {noun} left out; lines {lines}{more}")


def _about(config: Mapping[str, Any], task: Task, records: Records, settings: EvaluationSettings) -> dict[str, Any]:
    return {
        **config,
        "task": asdict(task),
        "settings": asdict(settings),
        "data_sha256": records.digest(),
        "skipped_records": [list(entry) for entry in records.skipped],
    }


def _begun(
    out: Path, about: Mapping[str, Any], methods: Mapping[Path, Method], prompts: list[list[int]], overwrite: bool
) -> KeptValues:
    """What is kept of this very run, begun here or earlier; raises OutputError if a finished run would be replaced."""
    sides = [[method.settings(), method.engine] for method in methods.values()]
    about = {**about, "methods": sides, "prompts": prompts}
    goes_on = is_unfinished(out, about)
    for directory in methods:
        # A run that goes on was begun where there were no results, or where they may be replaced: they are its own.
        check_directory(directory, overwrite=overwrite or goes_on)
    return keep_unfinished(out, about)


@dataclass(frozen=True)
class _Work:
    """What every method is run and scored on: prompts that fit, of records in their order."""

    subject: Subject
    task: Task
    records: Sequence[Record]
    prompts: list[list[int]]
    settings: EvaluationSettings
    progress: bool

    def generate(self, methods: Sequence[Method], kept: KeptValues) -> list[Outputs]:
        """The outputs of each method, next to the one full depth that ran beside all on the same engine."""
        sides = list(methods)
        if self.settings.full_depth:
            there = {side.engine for side in sides if side.full_depth}
            used = {side.engine for side in sides}
            sides += [full for full in self.subject.full if full.engine in used - there]
        with self._bar("generate") as bar:
            found = generate_all(
                self.subject.model,
                sides,
                self.prompts,
                kept,
                batch_size=self.settings.batch_size,
                max_new_tokens=self.settings.max_new_tokens or 1,
                eos=self.subject.eos,
                progress=bar.update,
            )
        full = {side.engine: given for side, given in zip(sides, found, strict=True) if side.full_depth}
        # Full depth is not compared with itself.
        return [
            Outputs(given, None if method.full_depth else full.get(method.engine))
            for method, given in zip(methods, found, strict=False)
        ]

    def score(self, method: Method, metrics: Sequence[Metric], outputs: Outputs) -> Scored:
        """All that the method's outputs are scored with."""
        texts, references = self._texts(outputs.tokens), [record.references for record in self.records]
        tables: dict[str, Table] = {}
        signatures: dict[str, str] = {}
        for metric in metrics:
            with self._bar(metric.name) as bar:
                tables[metric.name] = metric.statistics(texts, references)
                bar.update(len(texts))
            signatures[metric.name] = metric.signature
        if outputs.full:
            tables |= free_running(outputs.tokens, outputs.full)
        if self.settings.teacher_forced:
            tables |= self._teacher_forced(method, outputs)
        return Scored(tables, signatures)

    def rows(self, outputs: Outputs, scored: Scored) -> list[dict[str, Any]]:
        """What ``outputs.jsonl`` says of each record."""
        texts, full_texts = self._texts(outputs.tokens), self._texts(outputs.full)
        rows = []
        for i, record in enumerate(self.records):
            row = {
                "id": str(record.id),
                "prompt": record.prompt,
                "references": list(record.references),
                "output": texts[i],
                "tokens": outputs.tokens[i],
                "prompt_tokens": len(self.prompts[i]),
                "reference_tokens": round(mean(map(len, response_ids(record.references, self.subject.tokenizer)))),
            }
            if full_texts:
                row |= {"full_output": full_texts[i], "full_tokens": outputs.full[i]}
            rows.append(row | {"statistics": scored.of_record(i)})
        return rows

    def _bar(self, name: str, passes: int = 1) -> Any:
        return progress_bar(passes * len(self.prompts), "record", name=name, shown=self.progress)

    def _texts(self, rows: list[list[int]]) -> list[str]:
        decode = self.subject.tokenizer.decode
        return [self.task.cut(decode(tokens, skip_special_tokens=True)) for tokens in rows]

    def _teacher_forced(self, method: Method, outputs: Outputs) -> dict[str, Table]:
        """The loss of references, fidelity along full depth's outputs if there are any; nothing without a schedule."""
        model = self.subject.model
        schedule = Schedule.full(len(decoder_layers(unwrap(model)))) if method.full_depth else method.schedule
        if schedule is None:
            return {}
        texts: list[tuple[Callable[..., dict[str, Table]], list[list[int]]]]
        texts = [(reference_loss, self._first_references())]
        if outputs.full:
            texts.append((teacher_forced, outputs.full))
        tables: dict[str, Table] = {}
        with self._bar("teacher-forced", len(texts)) as bar:
            for measure, given in texts:
                for indices in batches([len(p) for p in self.prompts], self.settings.batch_size):
                    rows, forced = [self.prompts[i] for i in indices], [given[i] for i in indices]
                    for name, table in measure(model, schedule, rows, forced).items():
                        tables.setdefault(name, np.zeros((len(self.prompts), 2)))[indices] = table
                    bar.update(len(indices))
        return tables

    def _first_references(self) -> list[list[int]]:
        """As far as the model's context reaches; the last token is not fed."""
        first = response_ids([record.references[0] for record in self.records], self.subject.tokenizer)
        context = self.subject.context
        if context is None:
            return first
        return [ids[: context - len(prompt) + 1] for ids, prompt in zip(first, self.prompts, strict=True)]
