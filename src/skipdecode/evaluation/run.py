"""An evaluation on records with references: outputs, scores and speed of methods, saved with all settings."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import mean
from typing import Any

from skipdecode.common.bootstrap import Table, compare, interval
from skipdecode.common.environment import environment
from skipdecode.common.jsonl import heading
from skipdecode.common.progress import note, progress_bar
from skipdecode.common.resume import ResumeLog
from skipdecode.data.chats import response_ids
from skipdecode.data.prompts import PromptEncoder, context_length, outside, prompt_room, vocabulary_size
from skipdecode.data.records import Record, Reject, lines_by_reason, reject_summary
from skipdecode.data.source import Records
from skipdecode.data.tasks import Task
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.opening import end_tokens
from skipdecode.errors import DataError
from skipdecode.evaluation.method_runs import Outputs, generate_all, measured_speeds
from skipdecode.evaluation.metrics import FIDELITY, METRICS, NEAR_ZERO, Metric, repeated
from skipdecode.evaluation.results import (
    OUTPUTS_FILE,
    RUN_FILE,
    EvaluationSettings,
    Run,
    load_run,
    save_run,
    unfinished_log,
)
from skipdecode.evaluation.scores import (
    Texts,
    agreement_tables,
    measure_in_batches,
    ratio_table,
    scorer_of,
    text_scores,
    token_fidelity,
    token_sums,
)
from skipdecode.generation.speed import Method, timing_of

_GENERATED = 0.6  # of the time: texts, before speeds


@dataclass(frozen=True)
class TaskEvaluation:
    """What all methods are evaluated on: a transformers model with nothing attached, and records with references.

    `prompts` are the token ids of the records' prompts, `settings` have the most tokens of an output. `config` is what
    the caller adds to the results, JSON-ready. After `until`, of `time.perf_counter()`, no further record is begun: the
    finished ones count.

    Raises OutputError for results that cannot be written.
    """

    model: Any
    tokenizer: Any
    task: Task
    records: Records
    prompts: Sequence[Sequence[int]]
    metrics: Sequence[Metric]
    settings: EvaluationSettings
    config: Mapping[str, Any]
    until: float = math.inf

    def run(self, methods: Mapping[Path, Method], out: Path, *, overwrite: bool = False) -> list[Run]:
        """Generate, time, score and save; the runs in the order of `methods`. An interrupted run continues.

        `methods` are by the directory for their ``run.json`` and ``outputs.jsonl``; one of them may be full depth, with
        which the others are compared. `out` is the directory for finished batches until all methods are saved.
        """
        decoding = [[method.settings(), method.engine] for method in methods.values()]
        depends_on = {**self._about, "methods": decoding, "prompts": self.prompts}
        with unfinished_log(out, depends_on, methods, overwrite=overwrite) as log:
            with self._bar("generate") as bar:
                outputs = generate_all(
                    list(methods.values()),
                    self.prompts,
                    self.settings,
                    log,
                    eos=end_tokens(self.model, self.tokenizer),
                    progress=bar.update,
                    until=time.perf_counter() + _GENERATED * (self.until - time.perf_counter()),
                )
            finished = len(next(iter(outputs.values())).tokens)
            records = replace(self.records, items=self.records.items[:finished])
            work = replace(self, records=records, prompts=self.prompts[:finished])
            runs = work._finished_runs(methods, outputs, log)
        return [runs[directory] for directory in methods]

    def _finished_runs(
        self, methods: Mapping[Path, Method], outputs: Mapping[Method, Outputs], log: ResumeLog
    ) -> dict[Path, Run]:
        """Time, score and save what was generated."""
        listed, runs = list(methods.values()), dict[Path, Run]()
        speeds = measured_speeds(listed, self.prompts, self.reference_tokens, self.settings, log, self.until)
        # Before scoring, because a signature may be complete only afterwards.
        scored_with = [[metric.name, metric.signature] for metric in self.metrics]
        # Full depth first: the others are compared with it.
        for directory, method in sorted(methods.items(), key=lambda item: not item[1].full_depth):
            speed = speeds.get(method, {})
            if log.get(f"saved {directory!a}") == scored_with and (directory / RUN_FILE).exists():
                run = load_run(directory)
            else:
                full = None if method.full_depth else next((run for run in runs.values() if run.full_depth), None)
                data, rows = self._document(method, outputs[method], full)
                run = save_run(directory, {**data, **speed}, rows)
                log.put(f"saved {directory!a}", scored_with)
            runs[directory] = Run(run.path, {**run.data, **speed})
        return runs

    @cached_property
    def _references(self) -> list[list[list[int]]]:
        """Token ids of each record's references."""
        chat = self.task.chat
        return [response_ids(record.references, self.tokenizer, chat=chat) for record in self.records.items]

    @cached_property
    def reference_tokens(self) -> list[int]:
        """Mean length of each record's references."""
        return [round(mean(map(len, references))) for references in self._references]

    @cached_property
    def _about(self) -> dict[str, Any]:
        return {
            **self.config,
            "task": asdict(self.task),
            "settings": asdict(self.settings),
            "data_sha256": self.records.digest(),
            "skipped_records": [list(entry) for entry in self.records.skipped],
        }

    def _scored(
        self, method: Method, outputs: Outputs, texts: Sequence[str], full_tokens: Texts
    ) -> tuple[dict[str, Table], dict[str, str]]:
        """Statistics of each record, shape (records, k), and signatures of the scores of the method's outputs.

        A signature has library, version and settings of a metric; a fidelity figure's is its definition. `full_tokens`
        are those of full depth; empty if it was not run, or for full depth itself.
        """
        records = self.records.items
        references = [[reference.strip() for reference in record.references] for record in records]
        tables: dict[str, Table] = {}
        signatures = dict(FIDELITY)
        for metric in self.metrics:
            with self._bar(metric.name) as bar:
                tables[metric.name] = metric.statistics(texts, references)
                bar.update(len(texts))
            signatures[metric.name] = metric.signature
        if self.task.copied:
            values_of_records = [repeated(record, self.task.copied) for record in records]
            pairs = zip(values_of_records, texts, strict=True)
            copied = [sum(value in text for value in values) for values, text in pairs]
            tables["copied"] = ratio_table(list(zip(copied, map(len, values_of_records), strict=True)))
        if full_tokens:
            tables |= agreement_tables(outputs.tokens, full_tokens)
        if self.settings.teacher_forced:
            tables |= self._teacher_forced(method, full_tokens)
        return tables, signatures

    def _document(
        self, method: Method, outputs: Outputs, full: Run | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The document of a method's results, without its speed, and the lines of ``outputs.jsonl``, scored.

        `full`, if there is one, is full depth on the same records.
        """
        texts = [self.task.cut(text) for text in method.texts(outputs.tokens, self.tokenizer)]
        full_rows = [] if full is None else full.outputs
        tables, signatures = self._scored(method, outputs, texts, [row["tokens"] for row in full_rows])
        draws = {"resamples": self.settings.resamples, "seed": self.settings.seed}
        metrics: dict[str, Any] = {}
        shares_kept: dict[str, Any] = {}
        for name, table in tables.items():
            bounds = interval(table, scorer_of(name), **draws)
            metrics[name] = {"score": bounds.estimate, "interval": asdict(bounds), "signature": signatures[name]}
            if full is not None and name in full.data["metrics"] and name in METRICS:
                share = compare(full.table(name), table, scorer_of(name), **draws).ratio
                near_zero = full.data["metrics"][name]["score"] < NEAR_ZERO
                shares_kept[name] = None if share is None or near_zero else asdict(share)
        rows = []
        for i, record in enumerate(self.records.items):
            row = {
                "id": str(record.id),
                "prompt": record.prompt,
                "references": list(record.references),
                "output": texts[i],
                "tokens": outputs.tokens[i],
                "prompt_tokens": len(self.prompts[i]),
                "reference_tokens": self.reference_tokens[i],
            }
            if full_rows:
                row |= {"full_output": full_rows[i]["output"], "full_tokens": full_rows[i]["tokens"]}
            rows.append(row | {"statistics": {name: table[i].tolist() for name, table in tables.items()}})
        about = {**self._about, "method": method.settings()}
        document = {
            **heading("evaluation"),
            "name": f"{about['name']} {method.name}" if about.get("name") else method.name,
            "n": len(rows),
            "nominal_speedup": method.schedule.nominal_speedup,
            **dict.fromkeys(("decode_speedup", "request_speedup"), 1.0 if method.full_depth else None),
            **dict.fromkeys(("speed", "full_depth_speed")),
            "engine": method.engine,
            "kept": shares_kept,
            "metrics": metrics,
            # Times of outputs of different lengths, which do not measure speed.
            "free_running": timing_of(outputs.batches),
            "outputs": OUTPUTS_FILE,
            "config": about,
            "environment": environment(),
        }
        return document, rows

    def _bar(self, name: str, passes: int = 1) -> Any:
        return progress_bar(passes * len(self.prompts), "record", name=name)

    def _teacher_forced(self, method: Method, full_tokens: Texts) -> dict[str, Table]:
        """The loss of references, and fidelity along full depth's outputs if there are any."""
        with self._bar("teacher-forced", 2 if full_tokens else 1) as bar:
            batching = self.settings.batch_size, bar.update
            scored = text_scores(method.backend, method.schedule, self.prompts, self._first_references(), *batching)
            tables = {"loss": token_sums([losses for losses, _ in scored])}
            if full_tokens:
                measure = partial(token_fidelity, self.model, method.schedule)
                rows = measure_in_batches(measure, self.prompts, full_tokens, *batching)
                tables |= {name: token_sums([row[name] for row in rows]) for name in ("top1_agreement", "kl")}
        return tables

    def _first_references(self) -> list[list[int]]:
        """Token ids of the first references, cut to the model's context; the last token is not fed."""
        first = [references[0] for references in self._references]
        context = context_length(self.model.config)
        if context is None:
            return first
        return [ids[: context - len(prompt) + 1] for ids, prompt in zip(first, self.prompts, strict=True)]


def note_left_out(rejects: Sequence[Reject]) -> None:
    """Note how many records are left out, and the line and reason of the first ones; nothing if there are none."""
    if rejects:
        note(f"{len(rejects)} record{'s' if len(rejects) > 1 else ''} left out: {lines_by_reason(rejects)}")


def records_that_fit(
    model: Any, tokenizer: Any, task: Task, source: Records, settings: EvaluationSettings, *, skip_bad: bool
) -> tuple[Records, list[list[int]]]:
    """The records whose prompts fit into the model's context, and the token ids of the prompts.

    `skip_bad` leaves out the others, with a note; without it they raise a DataError. So do references of a record that
    are scored and have a token that the model does not know.
    """
    vocabulary = vocabulary_size(model)
    room = prompt_room(context_length(model.config), settings.max_new_tokens or 0)
    fitting, prompts = encode_prompts(
        task.template, source, tokenizer, room=room, vocabulary=vocabulary, skip_bad=skip_bad
    )
    note_left_out(fitting.skipped[len(source.skipped) :])
    if settings.teacher_forced:
        texts = [record.references[0] for record in fitting.items]
        for record, ids in zip(fitting.items, response_ids(texts, tokenizer, chat=task.chat), strict=True):
            if (fault := outside(ids, tokenizer, vocabulary)) is not None:
                raise DataError(f"the reference of record {record.id} has a {fault}", record.line)
    return fitting, prompts


def encode_prompts(
    template: PromptTemplate,
    records: Records,
    tokenizer: Any,
    *,
    room: int | None = None,
    vocabulary: int | None = None,
    skip_bad: bool = False,
) -> tuple[Records, list[list[int]]]:
    """Token ids of the prompts of all records, and the records that have them.

    `room`: most tokens that the model's context leaves for a prompt. `vocabulary`: as for `PromptEncoder`. `skip_bad`:
    leave out records whose prompt is too long, has no token or one that the model does not know, instead of refusing
    all; the returned records name them as skipped.

    Raises DataError if there are such prompts and `skip_bad` is false (all are counted, the first ones named), or no
    record is left.
    """
    items: list[Record] = []
    prompts: list[list[int]] = []
    rejects: list[Reject] = []
    most = min((n for n in (template.max_prompt_tokens, room) if n is not None), default=None)
    encoder = PromptEncoder(tokenizer, None, template, vocabulary=vocabulary)
    for prompt in encoder.encode(records.items, room):
        error = prompt.error
        if most is not None and len(prompt.token_ids) > most:
            has = f"has {len(prompt.token_ids)} tokens, there is room for {most}"
            if template.truncate is not None:
                has = f"has more than {most} tokens without {template.truncate!r} too"
            error = f"prompt too long: that of record {prompt.record.id} {has}"
        if error is not None:
            rejects.append(Reject(prompt.record.line, error))
        else:
            items.append(prompt.record)
            prompts.append(prompt.token_ids)
    if rejects and not (skip_bad and items):
        remedy = "shorten what is too long, lower max_new_tokens" + (
            "" if template.truncate else ", name a field to cut in the task file (truncate, max_prompt_tokens)"
        )
        raise DataError(f"{reject_summary(rejects)}; {remedy}" + (", or give `bad_records` skip" if items else ""))
    return replace(records, items=tuple(items), skipped=(*records.skipped, *rejects)), prompts
