"""Greedy answers of a model to the prompts of records, with the distributions that they were chosen from."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from skipdecode.common.progress import note, progress_bar
from skipdecode.common.resume import ANEW, ResumeLog
from skipdecode.data.examples import Example
from skipdecode.engine.opening import Backend, end_tokens, open_engines
from skipdecode.engine.requests import Request
from skipdecode.evaluation.method_runs import in_w8a8
from skipdecode.generation.self_generated import is_repetitive, without_broken_end
from skipdecode.generation.speed import OutOfTime, groups_in_time, steps_until
from skipdecode.learning.distributions import TeacherTopK
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.models.loading.identity import checkpoint_digest

TOP_K = 32
"""Tokens of a distribution that are kept."""
_LONGER = 1.5  # than the longest response: an answer of so many tokens is cut
_ROWS, _AT_ONCE = 32, 128  # answers that are decoded together, and that are stored together


@dataclass(frozen=True)
class Answer:
    """An answer to the prompt of an example: its tokens, their distributions, and its text without a broken end."""

    example: Example
    tokens: list[int]
    taught: TeacherTopK
    text: str


def answer_examples(loaded: LoadedModel, examples: Sequence[Example], log_file: Path, until: float) -> list[Answer]:
    """Answer the prompts of the first examples at full depth, as many as the time allows.

    Answers that are longer than any response are cut. Those that repeat themselves, or have no text, are left out.

    `log_file` keeps the answers of an interrupted run. `until`: reading of `time.perf_counter()`.
    """
    most = round(_LONGER * max(len(example.response) for example in examples))
    about = {"checkpoint": checkpoint_digest(loaded) | {"fit": None}, "most": most}
    ends = set(end_tokens(loaded.model, loaded.tokenizer))
    backend = open_engines(loaded.model, "auto", note)
    backend = in_w8a8(backend) or backend  # its answers are as good, and take half of the time
    # The log of another tuning at full depth is replaced.
    log = ResumeLog(log_file, about, what="answers", remedy=ANEW, restart=True)
    prompts, loops, answers = [example.prompt for example in examples], 0, list[Answer]()
    with closing(log), progress_bar(len(examples), "answer") as bar:
        decoded = greedy_answers(
            backend, prompts, log, max_new_tokens=most, ends=ends, until=until, progress=bar.update
        )
        for example, (tokens, taught) in zip(examples, decoded, strict=False):
            ended = tokens[-1] in ends
            if not ended and is_repetitive(tokens):
                loops += 1
                continue
            text = str(loaded.tokenizer.decode(tokens, skip_special_tokens=True)).strip()  # type: ignore[union-attr]
            if text := text if ended else without_broken_end(text):
                answers.append(Answer(example, tokens, taught, text))
    if loops:
        note(f"{loops} answers are left out: they repeat themselves up to the limit of {most} tokens")
    return answers


def greedy_answers(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    log: ResumeLog,
    *,
    max_new_tokens: int,
    ends: Collection[int],
    until: float = math.inf,
    progress: Callable[[int], None] = lambda answers: None,
) -> Iterator[tuple[list[int], TeacherTopK]]:
    """Yield the tokens and the distributions of the answers to the first prompts, as many as the time allows.

    `log` keeps the answers of an interrupted run. `until`: reading of `time.perf_counter()`.
    """
    engine = backend.engine(max_rows=_ROWS, prefix_cache=True)
    sampling, stops = replace(backend.sampling, top_logprobs=TOP_K), frozenset(ends)
    with suppress(OutOfTime):
        for group, limit in groups_in_time(len(prompts), _AT_ONCE, until):
            key = f"{group.start} to {group.stop}"  # without a clock there are other groups
            answers = log.get(key)
            if answers is None:
                requests = [Request(tuple(prompts[i]), max_new_tokens, sampling, stops) for i in group]
                answers = [
                    ([out.token for out in steps], TeacherTopK.of_steps([out.top for out in steps]).to_text())
                    for steps in steps_until(engine, requests, limit)
                ]
                log.put(key, answers)
            for tokens, text in answers:
                yield tokens, TeacherTopK.from_text(text, len(tokens))
            progress(len(group))
