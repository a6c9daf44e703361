"""Generates outputs for all records of an input: the engine gets a window of records and sorts it by length.

Only one window of records is in memory at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from skipdecode.data.prompts import EncodedPrompt, PromptEncoder
from skipdecode.data.records import Record
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.base import Engine
from skipdecode.engine.requests import Request, Sampling
from skipdecode.errors import DataError, UsageError, WorkError
from skipdecode.generation.calls import CallForm, CallReader
from skipdecode.generation.detokenizer import Detokenizer, TokenTexts
from skipdecode.generation.grammar import Grammars
from skipdecode.generation.loop import Generated, TextLoop
from skipdecode.generation.speed import MOST_BATCHES, Method, spread_over, time_equal_lengths
from skipdecode.generation.stats import RunStats, SpeedComparison

if TYPE_CHECKING:
    from skipdecode.generation.records import RowWriter

_WINDOW_BATCHES = 64
_CHECK_WINDOW = 1024


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a sequence is decoded, and when it ends, where its record asks for nothing else (`Record.asked`)."""

    texts: TokenTexts
    sampling: Sampling  # the seed is the job's: each sequence gets its own
    max_new_tokens: int  # most new tokens of a sequence; fewer if the context ends
    ends: frozenset[int]  # a sequence ends after any of these tokens
    stop: StopStrings = field(default_factory=StopStrings)  # strings that end a text; the text is cut before them
    exact: bool = True  # draft where that is faster; see `skipdecode.engine.Request`
    grammars: Grammars | None = None  # compiles the JSON schemas of records; without it they are not used

    def checked(self, prompts: list[EncodedPrompt]) -> list[EncodedPrompt]:
        """The prompts, each with an error if its record asks for what cannot be done."""
        return [replace(p, error=fault) if (fault := self._fault(p)) else p for p in prompts]

    def _fault(self, prompt: EncodedPrompt) -> str | None:
        if prompt.error is None and prompt.record.asked and self.grammars is not None:
            try:
                self.request(prompt).check_vocabulary(self.grammars.vocab_size)
            except UsageError as e:
                return f"body: {e}"
        return None

    def form(self, prompt: EncodedPrompt) -> CallForm | None:
        """How the model calls the tools of a record that OpenAI's form gives; None without tools or a known form."""
        calling = prompt.record.asked.get("calling")
        if calling is None or self.grammars is None:
            return None
        form = CallForm.of(self.grammars.tokenizer, calling.shown) if calling.shown else None
        if form is None and calling.demanded:
            raise UsageError("tool_choice demands a call, which this model's chat template has no known form for")
        return form

    def begin(self, prompt: EncodedPrompt) -> Generated:
        """The request of a prompt for a `TextLoop`."""
        return Generated(self.request(prompt), self.reader(prompt))

    def request(self, prompt: EncodedPrompt) -> Request:
        """The request for the engine."""
        asked = prompt.record.asked
        most = asked.get("max_new_tokens", self.max_new_tokens)
        room = most if prompt.room is None else min(most, prompt.room)
        own = asked.get("sampling") or {}
        if "json_schema" in asked and self.grammars is not None:
            own = {**own, "grammar": self.grammars.compile("json", asked["json_schema"])}
        if (form := self.form(prompt)) is not None and asked["calling"].demanded and self.grammars is not None:
            words = self.grammars.tokenizer.added_tokens_decoder
            own = {**own, "grammar": self.grammars.compile("lark", form.grammar(asked["calling"], words))}
        sampling = replace(self.sampling, **own) if own else self.sampling
        sampling = sampling.for_row(0 if "seed" in own else prompt.record.index)  # its own seed: as in the server
        return Request(tuple(prompt.token_ids), room, sampling, self.ends, exact=self.exact)

    def reader(self, prompt: EncodedPrompt) -> Detokenizer:
        """Turns a sequence's tokens into text, and finds stop strings."""
        return Detokenizer(self.texts, prompt.record.asked.get("stop", self.stop))


@dataclass(frozen=True, kw_only=True)
class Job(Decoding):
    """How outputs for all records of an input are generated, and what they contain."""

    encoder: PromptEncoder
    make_engine: Callable[[int], Engine]  # from a number of sequences to an engine under the job's schedule
    batch_size: int
    repeat: Callable[[EncodedPrompt], str] | None = None  # from a prompt to what the output repeats of it
    compared: tuple[Method, Method] | None = None  # the job's method and full depth, which are timed in the end
    answers_of: str | None = None  # the model's name, for output records in the form of OpenAI's batches

    def row(self, prompt: EncodedPrompt, one: Generated | None = None) -> dict[str, Any]:
        """The output record of a sequence, or of a record that cannot be used."""
        record = prompt.record
        if self.answers_of is not None:
            return batch_line(prompt, one, self.answers_of, None if one is None else self.form(prompt))
        if one is None:  # its line number might be the id of another record
            return {"id": record.id if record.has_id else None, "line": record.line, "error": prompt.error}
        return {
            "id": record.id,
            **({} if self.repeat is None else {"prompt": self.repeat(prompt)}),
            "text": one.text,
            "new_tokens": len(one.tokens),
            "finish_reason": one.finish_reason,
        }


@dataclass(eq=False)
class _Row(Generated):
    """A record whose sequence is running."""

    prompt: EncodedPrompt


class _Run:
    """A running job."""

    def __init__(self, job: Job, writer: RowWriter, rows: int, stats: RunStats, engine: Engine) -> None:
        self.job, self.writer, self.stats = job, writer, stats
        self.loop = TextLoop[_Row](engine)
        self.compared: list[Request] = []  # each with as many tokens as its sequence took
        self._every = max(1, rows // (MOST_BATCHES * job.batch_size))
        self._finished = 0

    def take(self, window: list[Record], report: Callable[[EncodedPrompt], None]) -> int:
        """Submit a window's records, and write those that cannot be used at once; returns the number of the latter."""
        prompts = self.job.checked(self.job.encoder.encode(window))
        bad = [prompt for prompt in prompts if prompt.error is not None]
        for prompt in bad:
            report(prompt)
            self.writer.put(prompt.record.index, self.job.row(prompt), bad=True)
        self.stats.rows += len(bad)
        self.stats.bad_rows += len(bad)
        good = [prompt for prompt in prompts if prompt.error is None]
        self.loop.submit(_Row(self.job.request(prompt), self.job.reader(prompt), prompt) for prompt in good)
        return len(bad)

    def step(self) -> int:
        """One step of the engine; returns the number of sequences that ended."""
        try:
            ended = self.loop.ended()
        except torch.OutOfMemoryError:
            raise WorkError(
                f"out of memory with {self.job.batch_size} rows of up to {self.job.max_new_tokens} new tokens: give a "
                "smaller batch size (finished rows of a file output are kept)"
            ) from None
        for one in ended:
            self.stats.ended_at_once += one.finish_reason == "eos" and len(one.tokens) == 1
            self.writer.put(one.prompt.record.index, self.job.row(one.prompt, one))
            self._keep_for_comparison(one)
        self.stats.rows += len(ended)
        return len(ended)

    def cut(self) -> int:
        """End the sequences that run, as at their most tokens; returns their number."""
        running = list(self.loop.running.values())
        for one in running:
            self.loop.remove(one)
            one.finish_reason = "length"
            self.writer.put(one.prompt.record.index, self.job.row(one.prompt, one))
        return len(running)

    def _keep_for_comparison(self, one: _Row) -> None:
        if self.job.compared is not None and self._finished % self._every == 0:
            self.compared.append(Request(one.request.prompt, len(one.tokens)))
        self._finished += 1


def generate_rows(
    records: Iterable[Record],
    job: Job,
    writer: RowWriter,
    rows: int,
    *,
    window_batches: int = _WINDOW_BATCHES,
    report: Callable[[EncodedPrompt], None] = lambda prompt: None,
    progress: Callable[[int, RunStats], None] = lambda rows, stats: None,
    until: float = math.inf,
    least: int = 0,
) -> RunStats:
    """Generate all `rows` records, in input order and not yet known to the writer, and put the output in place.

    `window_batches` batches of records are taken at once. `report` is called with each record that cannot be used,
    which is written as ``{"id", "line", "error"}``; `progress` with the number of records that were just finished, and
    the statistics so far. After `until`, of ``time.perf_counter()``, sequences are cut once there are `least` tokens.

    Raises OutputError: a record cannot be written; WorkError: the accelerator is out of memory.
    """
    engine = job.make_engine(job.batch_size)
    engine.stats = stats = RunStats(
        num_layers=engine.num_layers,
        rows=writer.rows_before,
        bad_rows=writer.bad_before,
        rows_resumed=writer.rows_before,
    )
    started = time.perf_counter()
    run = _Run(job, writer, rows, stats, engine)
    windows = _windows(records, window_batches * job.batch_size)
    window = next(windows, None)
    while window is not None or engine.has_work:
        if window is not None and not engine.waiting:
            progress(run.take(window, report), stats)
            window = next(windows, None)
        if ended := run.step():
            progress(ended, stats)
        if time.perf_counter() > until and stats.new_tokens >= least:
            progress(run.cut(), stats)
            window = None
    stats.seconds = time.perf_counter() - started
    if job.compared is not None:
        # Before the output is put in place, so that an interrupted comparison can be resumed.
        stats.comparison = _compared(run.compared, job.compared, job.batch_size)
    writer.finish()
    return stats


def batch_line(
    prompt: EncodedPrompt, one: Generated | None, model: str, form: CallForm | None = None
) -> dict[str, Any]:
    """The line of a record, with an answer or an error, in a result of OpenAI's batches.

    With `form`, calls of the record's tools are taken out of the text.
    """
    record, number = prompt.record, prompt.record.index
    named = {"id": f"batch_req_{number}", "custom_id": str(record.id) if record.has_id else None}
    if one is None or one.finish_reason == "error":
        why = f"line {record.line}: {prompt.error or 'the JSON schema takes too much work'}"
        return {**named, "response": None, "error": {"code": "invalid_request", "message": why}}
    chat, counts = not isinstance(record.prompt, str), (len(prompt.token_ids), len(one.tokens))
    text, calls = one.text, list[dict[str, Any]]()
    if form is not None:
        text, calls = CallReader(form, record.asked["calling"]).push(text, last=True)
    message = {"role": "assistant", "content": None if calls and not text else text}
    ended = "length" if one.finish_reason == "length" else "tool_calls" if calls else "stop"
    body = {
        "id": f"cmpl-{number}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            {"index": 0, "logprobs": None, "finish_reason": ended}
            | ({"message": message | ({"tool_calls": calls} if calls else {})} if chat else {"text": text})
        ],
        "usage": {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)},
    }
    return {**named, "response": {"status_code": 200, "request_id": f"req_{number}", "body": body}, "error": None}


def refuse_bad_rows(records: Iterable[Record], job: Job) -> None:
    """Raise DataError at the first record that cannot be used, before anything is generated."""
    for window in _windows(records, _CHECK_WINDOW):
        for prompt in job.checked(job.encoder.encode(window)):
            if prompt.error is not None:
                raise DataError(prompt.error, prompt.record.line)


def _windows(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    rows = iter(records)
    while window := list(islice(rows, size)):
        yield window


def _compared(requests: list[Request], methods: tuple[Method, Method], batch_size: int) -> SpeedComparison:
    """Time a method and full depth on requests, for as many tokens as their sequences took."""
    ours, full = methods
    timed = [request for request in requests if request.max_new_tokens > 1]  # else there is no step to compare
    wanted = min(len(timed), MOST_BATCHES * batch_size)
    chosen = [timed[i] for i in spread_over(len(timed), wanted)]
    lengths = [request.max_new_tokens for request in chosen]
    turns = time_equal_lengths([full, ours], [r.prompt for r in chosen], lengths, batch_size=batch_size)
    return SpeedComparison(turns, ours, full, batch_size, sum(lengths))
