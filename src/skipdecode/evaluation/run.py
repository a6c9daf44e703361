"""An evaluation on records with references: outputs, scores and speed of methods, saved with all settings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean, mean
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
from skipdecode.engine.opening import Backend, end_tokens, open_engines
from skipdecode.errors import DataError, SkipDecodeError
from skipdecode.evaluation.metrics import FIDELITY, METRICS, NEAR_ZERO, Metric, repeated
from skipdecode.evaluation.results import (
    OUTPUTS_FILE,
    RUN_FILE,
    EvaluationSettings,
    Run,
    check_free,
    load_run,
    open_log,
    save_run,
)
from skipdecode.evaluation.scores import along, free_running, scorer_of, sums, table_of, text_scores, token_fidelity
from skipdecode.generation.speed import (
    HOW,
    MOST_BATCHES,
    Generation,
    Method,
    OutOfTime,
    Turns,
    batches,
    fitting_share,
    groups_in_time,
    medians_of,
    request_seconds,
    spread_over,
    time_equal_lengths,
    timed_tokens,
    timing_of,
)
from skipdecode.schedule import Schedule

WHAT = f"outputs of the lengths of the references; {HOW}"
_LEAST_ROWS = 4  # of a timed batch of fewer sequences
_ALONE, _ALONE_TOKENS = 2, 64  # records that are decoded alone, once, and their most new tokens
_GENERATED = 0.6  # of the time: texts, before speeds
_LEAST_TURNS = 8  # if there are enough records: an interrupted run keeps whole turns


@dataclass(frozen=True)
class TaskEvaluation:
    """What all methods are evaluated on: a transformers model with nothing attached, and records with references.

    `config` is what the caller adds to the results, JSON-ready; `skip_bad` leaves out, and names, records whose prompt
    is too long. After `until`, of `time.perf_counter()`, no further record is begun: the finished ones count.

    Raises SkipDecodeError for prompts that are too long and results that cannot be written.
    """

    model: Any
    tokenizer: Any
    task: Task
    given: Records
    metrics: Sequence[Metric]
    asked: EvaluationSettings
    config: Mapping[str, Any]
    skip_bad: bool = False
    until: float = math.inf

    def run(self, methods: Mapping[Path, Method], out: Path, *, overwrite: bool = False) -> list[Run]:
        """Generate, time, score and save; the runs in the order of `methods`. An interrupted run continues.

        `methods` are by the directory for their ``run.json`` and ``outputs.jsonl``; one of them may be full depth, with
        which the others are compared. `out` is the directory for finished batches until all methods are saved.
        """
        with closing(open_log(out, self._whole(methods), overwrite=overwrite)) as kept:
            for directory in methods:
                # A run that continues wrote the results that are there, or may replace them.
                check_free(directory, overwrite=overwrite or kept.count > 0)
            outputs = self._generated(list(methods.values()), kept)
            finished = len(next(iter(outputs.values())).tokens)
            work = self if finished == len(self.prompts) else self._of_first(finished)
            runs = work._finished_runs(methods, outputs, kept)
            kept.remove()
        return [runs[directory] for directory in methods]

    def _of_first(self, count: int) -> TaskEvaluation:
        """The same evaluation of the first records alone."""
        return replace(self, given=replace(self.records, items=self.records.items[:count]))

    def _finished_runs(
        self, methods: Mapping[Path, Method], outputs: Mapping[Method, Outputs], kept: ResumeLog
    ) -> dict[Path, Run]:
        """Time, score and save what was generated."""
        every, runs = list(methods.values()), dict[Path, Run]()
        speeds = measured_speeds(every, self.prompts, self.reference_tokens, self.settings, kept, self.until)
        # Before scoring, because a signature may be complete only afterwards.
        scored_with = [[metric.name, metric.signature] for metric in self.metrics]
        # Full depth first: the others are compared with it.
        for directory, method in sorted(methods.items(), key=lambda item: not item[1].full_depth):
            speed = speeds.get(method, {})
            if kept.get(f"saved {directory!a}") == scored_with and (directory / RUN_FILE).exists():
                run = load_run(directory)
            else:
                full = None if method.full_depth else next((run for run in runs.values() if run.full_depth), None)
                data, rows = self._document(method, outputs[method], full)
                run = save_run(directory, {**data, **speed}, rows)
                kept.put(f"saved {directory!a}", scored_with)
            runs[directory] = Run(run.path, {**run.data, **speed})
        return runs

    # ------------------------------------------------------------------ the input

    @cached_property
    def settings(self) -> EvaluationSettings:
        """The settings, with the task's longest output if no other is asked for."""
        return replace(self.asked, max_new_tokens=self.asked.max_new_tokens or self.task.max_new_tokens)

    @property
    def records(self) -> Records:
        """The records whose prompts fit."""
        return self._encoded[0]

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of the prompts."""
        return self._encoded[1]

    @cached_property
    def _encoded(self) -> tuple[Records, list[list[int]]]:
        tokenizer, vocabulary = self.tokenizer, vocabulary_size(self.model)
        room = prompt_room(context_length(self.model.config), self.settings.max_new_tokens or 0)
        fitting, prompts = encode_prompts(
            self.task.template, self.given, tokenizer, room=room, vocabulary=vocabulary, skip_bad=self.skip_bad
        )
        note_left_out(fitting.skipped[len(self.given.skipped) :])
        if self.settings.teacher_forced:
            texts = [record.references[0] for record in fitting.items]
            for record, ids in zip(fitting.items, response_ids(texts, tokenizer, chat=self.task.chat), strict=True):
                if (fault := outside(ids, tokenizer, vocabulary)) is not None:
                    raise DataError(f"the reference of record {record.id} has a {fault}", record.line)
        return fitting, prompts

    @cached_property
    def reference_tokens(self) -> list[int]:
        """Mean length of each record's references."""
        tokenizer = self.tokenizer
        each = [response_ids(record.references, tokenizer, chat=self.task.chat) for record in self.records.items]
        return [round(mean(map(len, ids))) for ids in each]

    @cached_property
    def _about(self) -> dict[str, Any]:
        return {
            **self.config,
            "task": asdict(self.task),
            "settings": asdict(self.settings),
            "data_sha256": self.records.digest(),
            "skipped_records": [list(entry) for entry in self.records.skipped],
        }

    def _whole(self, methods: Mapping[Path, Method]) -> dict[str, Any]:
        """Everything that the outputs depend on."""
        how = [[method.settings(), method.engine] for method in methods.values()]
        return {**self._about, "methods": how, "prompts": self.prompts}

    # ------------------------------------------------------------------ steps

    def _generated(self, methods: Sequence[Method], kept: ResumeLog) -> dict[Method, Outputs]:
        """The outputs of each method, next to those of full depth."""
        with self._bar("generate") as bar:
            found = generate_all(
                methods,
                self.prompts,
                kept,
                batch_size=self.settings.batch_size,
                max_new_tokens=self.settings.max_new_tokens or 1,
                eos=set(end_tokens(self.model, self.tokenizer)),
                progress=bar.update,
                until=time.perf_counter() + _GENERATED * (self.until - time.perf_counter()),
            )
        full = next((each.tokens for one, each in zip(methods, found, strict=True) if one.full_depth), [])
        # Full depth is not compared with itself.
        return {
            one: each if one.full_depth else replace(each, full=full) for one, each in zip(methods, found, strict=True)
        }

    def _scored(self, method: Method, outputs: Outputs) -> tuple[dict[str, Table], dict[str, str]]:
        """Statistics of each record, shape (records, k), and signatures of the scores of the method's outputs.

        A signature has library, version and settings of a metric; a fidelity figure's is its definition.
        """
        records = self.records.items
        texts = self._texts(outputs.tokens, method)
        references = [[reference.strip() for reference in record.references] for record in records]
        tables: dict[str, Table] = {}
        signatures = dict(FIDELITY)
        for metric in self.metrics:
            with self._bar(metric.name) as bar:
                tables[metric.name] = metric.statistics(texts, references)
                bar.update(len(texts))
            signatures[metric.name] = metric.signature
        if self.task.copied:
            asked = [repeated(record, self.task.copied) for record in records]
            found = [sum(value in text for value in each) for each, text in zip(asked, texts, strict=True)]
            tables["copied"] = table_of(list(zip(found, map(len, asked), strict=True)))
        if outputs.full:
            tables |= free_running(outputs.tokens, outputs.full)
        if self.settings.teacher_forced:
            tables |= self._teacher_forced(method, outputs)
        return tables, signatures

    def _document(
        self, method: Method, outputs: Outputs, full: Run | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The document of a method's results, without its speed, and the lines of ``outputs.jsonl``, scored.

        `full`, if there is one, is full depth on the same records.
        """
        tables, signatures = self._scored(method, outputs)
        rows, about = self._rows(method, outputs, tables), {**self._about, "method": method.settings()}
        draws = {"resamples": self.settings.resamples, "seed": self.settings.seed}
        metrics: dict[str, Any] = {}
        kept: dict[str, Any] = {}
        for name, table in tables.items():
            bounds = interval(table, scorer_of(name), **draws)
            metrics[name] = {"score": bounds.estimate, "interval": asdict(bounds), "signature": signatures[name]}
            if full is not None and name in full.data["metrics"] and name in METRICS:
                share = compare(full.table(name), table, scorer_of(name), **draws).ratio
                near_zero = full.data["metrics"][name]["score"] < NEAR_ZERO
                kept[name] = None if share is None or near_zero else asdict(share)
        document = {
            **heading("evaluation"),
            "name": f"{about['name']} {method.name}" if about.get("name") else method.name,
            "n": len(rows),
            "nominal_speedup": method.schedule.nominal_speedup,
            **dict.fromkeys(("decode_speedup", "request_speedup"), 1.0 if method.full_depth else None),
            **dict.fromkeys(("speed", "full_depth_speed")),
            "engine": method.engine,
            "kept": kept,
            "metrics": metrics,
            # Times of outputs of different lengths, which do not measure speed.
            "free_running": timing_of(outputs.batches),
            "outputs": OUTPUTS_FILE,
            "config": about,
            "environment": environment(),
        }
        return document, rows

    def _rows(self, method: Method, outputs: Outputs, tables: Mapping[str, Table]) -> list[dict[str, Any]]:
        """The lines of ``outputs.jsonl``, one per record."""
        texts, full_texts = self._texts(outputs.tokens, method), self._texts(outputs.full, method)
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
            if full_texts:
                row |= {"full_output": full_texts[i], "full_tokens": outputs.full[i]}
            rows.append(row | {"statistics": {name: table[i].tolist() for name, table in tables.items()}})
        return rows

    def _bar(self, name: str, passes: int = 1) -> Any:
        return progress_bar(passes * len(self.prompts), "record", name=name)

    def _texts(self, rows: list[list[int]], method: Method) -> list[str]:
        return [self.task.cut(text) for text in method.texts(rows, self.tokenizer)]

    def _teacher_forced(self, method: Method, outputs: Outputs) -> dict[str, Table]:
        """The loss of references, and fidelity along full depth's outputs if there are any."""
        with self._bar("teacher-forced", 2 if outputs.full else 1) as bar:
            each: dict[str, Any] = {"batch_size": self.settings.batch_size, "advance": bar.update}
            scored = text_scores(method.backend, method.schedule, self.prompts, self._first_references(), **each)
            tables = {"loss": sums([losses for losses, _ in scored])}
            if outputs.full:
                measure = partial(token_fidelity, self.model, method.schedule)
                rows = along(measure, self.prompts, outputs.full, **each)
                tables |= {name: sums([row[name] for row in rows]) for name in ("top1_agreement", "kl")}
        return tables

    def _first_references(self) -> list[list[int]]:
        """Token ids of the first references, cut to the model's context; the last token is not fed."""
        texts = [record.references[0] for record in self.records.items]
        first = response_ids(texts, self.tokenizer, chat=self.task.chat)
        context = context_length(self.model.config)
        if context is None:
            return first
        return [ids[: context - len(prompt) + 1] for ids, prompt in zip(first, self.prompts, strict=True)]


def note_left_out(rejects: Sequence[Reject]) -> None:
    """Note how many records are left out, and the line and reason of the first ones; nothing if there are none."""
    if rejects:
        note(f"{len(rejects)} record{'s' if len(rejects) > 1 else ''} left out: {lines_by_reason(rejects)}")


# ---------------------------------------------------------------------- outputs and speeds of methods


@dataclass(frozen=True)
class Outputs:
    """The outputs of one method: tokens of every record in the order of the prompts, and the cost of each batch.

    `full` are full depth's tokens, for comparison; empty if it was not run, or for full depth itself.
    """

    tokens: list[list[int]]
    batches: list[Generation]
    full: list[list[int]] = field(default_factory=list)


def with_w8a8(backend: Backend, schedules: Sequence[Schedule]) -> list[Method]:
    """Full depth and the schedules with W8A8 weights; none where the backend has no such weights on this machine."""
    if backend.fast is None or backend.fast.quantization is not None:
        return []
    try:
        fast = open_engines(backend.model, "fast", lambda text: None, "w8a8", generation_config=False)
    except SkipDecodeError:
        return []
    fast.sampling, fast.stop = backend.sampling, backend.stop
    full = Method(fast, name="full, w8a8", beside=True)
    return [full, *(Method(fast, s, f"{s.name}, w8a8") for s in schedules if not s.is_full)]


def generate_all(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    kept: ResumeLog,
    *,
    batch_size: int,
    max_new_tokens: int,
    eos: set[int],
    progress: Callable[[int], None] = lambda rows: None,
    until: float = math.inf,
) -> list[Outputs]:
    """Run methods over all prompts; the outputs of each, in order.

    `kept` has batches that an earlier, interrupted run finished, and stores those of this run. `progress` is called
    with the number of records of each batch. After `until` the outputs are of the first prompts alone.
    """
    tokens = [dict[int, list[int]]() for _ in methods]
    taken: list[list[Generation]] = [[] for _ in methods]
    # An engine gets the sequences of several batches together, and sorts them into batches by length.
    at_once = batch_size * max(1, min(MOST_BATCHES, len(prompts) // (batch_size * _LEAST_TURNS)))
    groups: Iterable[tuple[Sequence[int], float]] = groups_in_time(len(prompts), batch_size, until)
    if until == math.inf:
        groups = ((group, until) for group in batches([len(prompt) for prompt in prompts], at_once))
    for number, (indices, limit) in enumerate(groups):
        how: dict[str, Any] = {"rows": min(batch_size, len(indices)), "max_new_tokens": max_new_tokens, "eos": eos}
        generations = [Generation(**g) for g in kept.get(f"batch {number}") or ()]
        if not generations:
            try:
                generations = [m.generate([prompts[i] for i in indices], until=limit, **how) for m in methods]
            except OutOfTime:
                break
            kept.put(f"batch {number}", [asdict(g) for g in generations])
        for generation, batches_done, outputs in zip(generations, taken, tokens, strict=True):
            batches_done.append(replace(generation, tokens=[]))
            outputs.update(zip(indices, generation.tokens, strict=True))
        progress(len(indices))
    return [Outputs([outputs[i] for i in sorted(outputs)], done) for outputs, done in zip(tokens, taken, strict=True)]


def measured_speeds(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    settings: EvaluationSettings,
    kept: ResumeLog,
    until: float = math.inf,
) -> dict[Method, dict[str, Any]]:
    """The speed of each method, for its result, from a few batches of records from all over the data, and alone.

    Empty without full depth and another method, or without time. Sequences get 2 new tokens at least, and at most as
    many as outputs may have. The other arguments are as in `time_equal_lengths`; in less time, fewer tokens are timed.
    """
    full = next((method for method in methods if method.full_depth), None)
    if full is None or len(methods) < 2 or time.perf_counter() > until:
        return {}
    size, rounds = settings.batch_size, settings.speed_rounds
    wanted = min(len(prompts), settings.speed_batches * max(size, _LEAST_ROWS))
    chosen = spread_over(len(prompts), wanted)
    rows, most = [prompts[i] for i in chosen], settings.max_new_tokens or 2
    each = [min(max(lengths[i], 2), most) for i in chosen]
    share = kept.get("share of the timed tokens")
    if share is None:
        share = fitting_share(methods, rows[:size], max(each), (until - time.perf_counter()) / 2)
        kept.put("share of the timed tokens", share)
    with progress_bar(rounds * wanted, "record", name="speed") as bar:
        timed: dict[str, Any] = {"kept": kept, "progress": bar.update, "rounds": rounds, "share": share}
        turns = time_equal_lengths(methods, rows, each, batch_size=size, until=until, **timed)
    request = max(settings.speed_tokens, fmean(each))
    about = {"what": WHAT, "records": wanted, "batch_size": size, "rounds": rounds, "request_tokens": request}
    about["new_tokens"] = sum(timed_tokens(length, share) for length in each)
    found = {method: speed_entries(turns, method, full, settings, about) for method in methods}
    if size == 1 or time.perf_counter() > until:
        return found
    few, short = rows[:_ALONE], share * min(1.0, _ALONE_TOKENS / fmean(each[:_ALONE]))
    alone = time_equal_lengths(methods, few, each[:_ALONE], batch_size=1, kept=kept, rounds=1, share=short)
    clock = request_seconds(request / fmean(timed_tokens(length, short) for length in each[:_ALONE]))
    for method, entries in found.items():
        entries["request_speedup_alone"] = alone.ratio(full, method, clock)
    return found


def speed_entries(
    turns: Turns, method: Method, full: Method, settings: EvaluationSettings, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The speed of a method, JSON-ready: the time of full depth for the same batches divided by the method's.

    With prompts, and of decoding alone; None if no time passed. Intervals are over batches, or the rounds of one.
    `about` describes the measurement; decoding counts as if it went on to its `request_tokens`.
    """
    plain = None if method is full else medians_of(turns, full)
    found: dict[str, Any] = {"speed": {**about, **medians_of(turns, method)}, "full_depth_speed": plain}
    longer = about.get("request_tokens", 0) * about.get("records", 1) / about.get("new_tokens", math.inf)
    clocks = {"request_speedup": request_seconds(longer), "decode_speedup": lambda g: g.decode_seconds}
    for name, clock in clocks.items():
        bounds = turns.interval(full, method, clock, resamples=settings.resamples, seed=settings.seed)
        found[name] = turns.ratio(full, method, clock)
        found[f"{name}_interval"] = None if method is full or bounds is None else asdict(bounds)
    return found


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
