"""Generates every row of an input: windows of rows, batches sorted by length inside a window, results to a writer.

Only one window of rows is in memory at a time, whatever the length of the input.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from skipdecode.data.output import RowWriter
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder
from skipdecode.data.records import Record
from skipdecode.data.stopping import StopStrings
from skipdecode.data.summary import Comparison, RunSummary
from skipdecode.engine.backend import Backend, BatchResult, GenerationSettings
from skipdecode.errors import DataError, SkipDecodeError

__all__ = ["WINDOW_BATCHES", "CompareWith", "Job", "RowMaker", "generate_rows", "make_batches", "refuse_bad_rows"]

WINDOW_BATCHES = 64
_WARM_UP_TOKENS = 2
_CHECK_WINDOW = 1024


@dataclass(frozen=True)
class CompareWith:
    """Full depth, run on every `every`-th batch next to the schedule."""

    backend: Backend
    every: int = 1


class RowMaker:
    """Makes output rows: ``id``, ``text``, ``new_tokens``, ``finish_reason`` (and ``prompt`` if asked for).

    Parameters
    ----------
    tokenizer : transformers tokenizer
    stop : StopStrings, optional
        Cut off the text.
    include_prompt : bool
        Repeat the prompt as it was tokenised.
    """

    def __init__(self, tokenizer: Any, stop: StopStrings | None = None, *, include_prompt: bool = False) -> None:
        self._tokenizer = tokenizer
        self.stop = stop
        self._include_prompt = include_prompt

    def row(self, prompt: EncodedPrompt, tokens: list[int], finish_reason: str) -> dict[str, Any]:
        """The output of a row that went well."""
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return {
            "id": prompt.record.id,
            **({"prompt": prompt.text} if self._include_prompt else {}),
            "text": text if self.stop is None else self.stop.cut(text),
            "new_tokens": len(tokens),
            "finish_reason": finish_reason,
        }


@dataclass(frozen=True)
class Job:
    """How rows are generated.

    Parameters
    ----------
    encoder : PromptEncoder
    backend : Backend
    settings : GenerationSettings
    make : RowMaker
    batch_size : int
        Rows decoded together.
    compare : CompareWith, optional
    """

    encoder: PromptEncoder
    backend: Backend
    settings: GenerationSettings
    make: RowMaker
    batch_size: int
    compare: CompareWith | None = None


def generate_rows(
    records: Iterable[Record],
    job: Job,
    writer: RowWriter,
    *,
    report: Callable[[EncodedPrompt], None] = lambda prompt: None,
    progress: Callable[[int, RunSummary], None] = lambda rows, summary: None,
) -> RunSummary:
    """Generate all `records` and put the output in place.

    Parameters
    ----------
    records : iterable of Record
        Rows that the writer does not have yet, in input order.
    report : callable
        Told of each row that cannot be generated; such a row is written as ``{"id", "line", "error"}``.
    progress : callable
        Told how many rows were finished just now, with the summary so far.

    Raises
    ------
    OutputError
        A row cannot be written.
    SkipDecodeError
        The accelerator is out of memory.
    """
    summary = RunSummary(job.backend.num_layers, writer.rows_before, writer.bad_before, rows_resumed=writer.rows_before)
    summary.comparison = None if job.compare is None else Comparison()
    started = time.perf_counter()
    for window in _windows(records, WINDOW_BATCHES * job.batch_size):
        prompts = job.encoder.encode(window)
        for prompt in (p for p in prompts if p.error is not None):
            report(prompt)
            error = {"id": prompt.record.id, "line": prompt.record.line, "error": prompt.error}
            writer.put(prompt.record.index, error, bad=True)
            summary.rows += 1
            summary.bad_rows += 1
            progress(1, summary)
        for batch, limit in make_batches(prompts, job.batch_size, job.settings.max_new_tokens):
            result = _generate(batch, replace(job.settings, max_new_tokens=limit), job, summary)
            for prompt, tokens, reason in zip(batch, result.tokens, result.finish_reasons, strict=True):
                writer.put(prompt.record.index, job.make.row(prompt, tokens, reason))
            summary.rows += len(batch)
            summary.add(sum(len(p.token_ids) for p in batch), result)
            progress(len(batch), summary)
    writer.finish()
    summary.seconds = time.perf_counter() - started
    return summary


def refuse_bad_rows(records: Iterable[Record], encoder: PromptEncoder) -> None:
    """Raise DataError at the first row that cannot be generated, before any is."""
    for window in _windows(records, _CHECK_WINDOW):
        for prompt in encoder.encode(window):
            if prompt.error is not None:
                raise DataError(prompt.error, prompt.record.line)


def make_batches(
    prompts: Sequence[EncodedPrompt], batch_size: int, max_new_tokens: int
) -> Iterator[tuple[list[EncodedPrompt], int]]:
    """Batches of prompts of like length, longest first, each with its limit of new tokens.

    Longest first, so that a batch that does not fit in memory fails at once. Rows near the end of the context have room
    for fewer new tokens; only rows with the same limit share a batch, so no row is cut short by its neighbours.
    """
    batch: list[EncodedPrompt] = []
    limit = max_new_tokens
    for prompt in sorted((p for p in prompts if p.error is None), key=lambda p: -len(p.token_ids)):
        own = max_new_tokens if prompt.room is None else min(max_new_tokens, prompt.room)
        if batch and (own != limit or len(batch) == batch_size):
            yield batch, limit
            batch = []
        limit = own
        batch.append(prompt)
    if batch:
        yield batch, limit


def _windows(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    rows = iter(records)
    while window := list(islice(rows, size)):
        yield window


def _generate(batch: list[EncodedPrompt], settings: GenerationSettings, job: Job, summary: RunSummary) -> BatchResult:
    import torch

    prompts = [p.token_ids for p in batch]
    keys = [p.record.index for p in batch]
    try:
        result = job.backend.generate(prompts, settings, keys, job.make.stop)
        if job.compare is not None and summary.comparison is not None and summary.batches % job.compare.every == 0:
            _compare(prompts, settings, keys, result, job.backend, job.compare.backend, summary.comparison)
        return result
    except torch.OutOfMemoryError:
        raise SkipDecodeError(
            f"out of memory with {len(batch)} rows of up to {len(prompts[0])} + {settings.max_new_tokens} tokens: "
            "give a smaller --batch-size (finished rows of a file output are kept)"
        ) from None


def _compare(
    prompts: list[list[int]],
    settings: GenerationSettings,
    keys: list[int],
    result: BatchResult,
    backend: Backend,
    full: Backend,
    comparison: Comparison,
) -> None:
    """Time both sides for as many steps as the rows took; every other batch in the other order."""
    same = replace(settings, max_new_tokens=result.steps + 1, ignore_eos=True)
    sides = [backend, full]
    if not comparison.ratios:
        for side in sides:
            side.generate(prompts, replace(same, max_new_tokens=min(result.steps + 1, _WARM_UP_TOKENS)), keys)
    order = sides if len(comparison.ratios) % 2 else sides[::-1]
    timed = {id(side): side.generate(prompts, same, keys) for side in order}
    comparison.add(timed[id(backend)], timed[id(full)])
