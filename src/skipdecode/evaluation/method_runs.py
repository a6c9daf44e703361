"""Runs methods over prompts: the outputs of each, kept batch by batch, and their speeds in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from skipdecode.common.progress import progress_bar
from skipdecode.common.resume import ResumeLog
from skipdecode.common.spread import spread_over
from skipdecode.engine.opening import Backend, open_engines
from skipdecode.engine.requests import Sampling
from skipdecode.errors import SkipDecodeError
from skipdecode.evaluation.results import EvaluationSettings
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
    time_equal_lengths,
    timed_tokens,
)
from skipdecode.schedule import Schedule

WHAT = f"outputs of the lengths of the references; {HOW}"
W8A8_NAME = ", w8a8"
"""The end of the name of a method with W8A8 weights."""
_LEAST_ROWS = 4  # of a timed batch of fewer sequences
_ALONE, _ALONE_TOKENS = 2, 64  # records that are decoded alone, once, and their most new tokens
_LEAST_TURNS = 8  # if there are enough records: an interrupted run keeps whole turns


@dataclass(frozen=True)
class Outputs:
    """The outputs of one method: tokens of every record in the order of the prompts, and the cost of each batch."""

    tokens: list[list[int]]
    batches: list[Generation]


def in_w8a8(backend: Backend) -> Backend | None:
    """The same model with W8A8 weights; None where there are none on this machine."""
    if backend.fast is None or backend.fast.quantization is not None:
        return None
    try:
        fast = open_engines(backend.model, "fast", lambda text: None, "w8a8", generation_config=False)
    except SkipDecodeError:
        return None
    fast.sampling, fast.stop = backend.sampling, backend.stop
    return fast


def with_w8a8(backend: Backend, schedules: Sequence[Schedule]) -> list[Method]:
    """Full depth and the schedules with W8A8 weights; none where the backend has no such weights on this machine."""
    if (fast := in_w8a8(backend)) is None:
        return []
    full = Method(fast, name=f"full{W8A8_NAME}", variant=True)
    return [full, *(Method(fast, s, s.name + W8A8_NAME) for s in schedules if not s.is_full)]


def generate_all(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    settings: EvaluationSettings,
    log: ResumeLog,
    *,
    eos: Collection[int],
    progress: Callable[[int], None],
    until: float,
    sampling: Callable[[Method, int], Sampling] | None = None,
) -> dict[Method, Outputs]:
    """Run methods over all prompts; the outputs of each, greedy without `sampling` of a method and a prompt's index.

    `log` has batches that an earlier, interrupted run finished, and stores those of this run. `progress` is called
    with the number of records of each batch. After `until` the outputs are of the first prompts alone.
    """
    batch_size = settings.batch_size
    tokens = {method: dict[int, list[int]]() for method in methods}
    generated: dict[Method, list[Generation]] = {method: [] for method in methods}
    groups: Iterable[tuple[Sequence[int], float]] = groups_in_time(len(prompts), batch_size, until)
    if until == math.inf:
        # An engine gets the sequences of several batches together, and sorts them into batches by length.
        at_once = batch_size * max(1, min(MOST_BATCHES, len(prompts) // (batch_size * _LEAST_TURNS)))
        groups = ((group, until) for group in batches([len(prompt) for prompt in prompts], at_once))
    for number, (indices, limit) in enumerate(groups):
        generations = [Generation(**g) for g in log.get(f"batch {number}") or ()]
        if not generations:
            try:
                generations = [
                    method.generate(
                        [prompts[i] for i in indices],
                        max_new_tokens=settings.max_new_tokens or 1,
                        eos=eos,
                        sampling=sampling and [sampling(method, i) for i in indices],
                        rows=min(batch_size, len(indices)),
                        until=limit,
                    )
                    for method in methods
                ]
            except OutOfTime:
                break
            log.put(f"batch {number}", [asdict(g) for g in generations])
        for method, generation in zip(methods, generations, strict=True):
            generated[method].append(replace(generation, tokens=[]))
            tokens[method].update(zip(indices, generation.tokens, strict=True))
        progress(len(indices))
    return {method: Outputs([rows[i] for i in sorted(rows)], generated[method]) for method, rows in tokens.items()}


def measured_speeds(
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    settings: EvaluationSettings,
    log: ResumeLog,
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
    new = [min(max(lengths[i], 2), most) for i in chosen]
    share = log.get("share of the timed tokens")
    if share is None:
        share = fitting_share(methods, rows[:size], max(new), (until - time.perf_counter()) / 2)
        log.put("share of the timed tokens", share)
    with progress_bar(rounds * wanted, "record", name="speed") as bar:
        turns = time_equal_lengths(
            methods, rows, new, batch_size=size, log=log, progress=bar.update, rounds=rounds, share=share, until=until
        )
    request = max(settings.speed_tokens, fmean(new))
    about = {"what": WHAT, "records": wanted, "batch_size": size, "rounds": rounds, "request_tokens": request}
    about["new_tokens"] = sum(timed_tokens(length, share) for length in new)
    speeds = {method: speed_entries(turns, method, full, settings, about) for method in methods}
    if size == 1 or time.perf_counter() > until:
        return speeds
    few, short = rows[:_ALONE], share * min(1.0, _ALONE_TOKENS / fmean(new[:_ALONE]))
    alone = time_equal_lengths(methods, few, new[:_ALONE], batch_size=1, log=log, rounds=1, share=short)
    clock = request_seconds(request / fmean(timed_tokens(length, short) for length in new[:_ALONE]))
    for method, entries in speeds.items():
        entries["request_speedup_alone"] = alone.ratio(full, method, clock)
    return speeds


def speed_entries(
    turns: Turns, method: Method, full: Method, settings: EvaluationSettings, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The speed of a method, JSON-ready: the time of full depth for the same batches divided by the method's.

    With prompts, and of decoding alone; None if no time passed. Intervals are over batches, or the rounds of one.
    `about` describes the measurement; decoding counts as if it went on to its `request_tokens`.
    """
    plain = None if method is full else medians_of(turns, full)
    entries: dict[str, Any] = {"speed": {**about, **medians_of(turns, method)}, "full_depth_speed": plain}
    longer = about.get("request_tokens", 0) * about.get("records", 1) / about.get("new_tokens", math.inf)
    clocks = {"request_speedup": request_seconds(longer), "decode_speedup": lambda g: g.decode_seconds}
    for name, clock in clocks.items():
        bounds = turns.interval(full, method, clock, resamples=settings.resamples, seed=settings.seed)
        entries[name] = turns.ratio(full, method, clock)
        entries[f"{name}_interval"] = None if method is full or bounds is None else asdict(bounds)
    return entries
