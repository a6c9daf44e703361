"""Greedy answers of a model at full depth, each with the distributions from which its tokens were chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from skipdecode.common.resume import ResumeLog
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request
from skipdecode.generation.speed import OutOfTime, groups_in_time, steps_until
from skipdecode.learning.distributions import TeacherTopK

TOP_K = 32
"""Tokens of a distribution that are kept."""
_ROWS, _AT_ONCE = 32, 128


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
