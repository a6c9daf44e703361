"""Measures decode steps and prompts of a model on this machine, by sequences, layers and cached tokens.

Real steps of the package's own engine, or of transformers' forward, run under constant schedules. All kinds of step
take turns, so that a change of the machine's speed affects all of them. The time of a decode step depends on how many
tokens the cache holds, not on their values, so prompts are not computed before it (`Engine.skips_prefill`): they would
take most of a measurement.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from skipdecode.common.bootstrap import Stopwatch
from skipdecode.common.progress import progress_bar
from skipdecode.cost.geometry import ModelGeometry
from skipdecode.cost.model import CostModel, PromptCost, StepCost, tokens_read
from skipdecode.data.prompts import context_length
from skipdecode.engine.base import Engine
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request
from skipdecode.engine.scheduler import PROMPT_TOKENS
from skipdecode.errors import UsageError
from skipdecode.models.families import lent_last, projects, unwrap
from skipdecode.schedule import Schedule

_LONGER = 512  # cached tokens on top, from which the cost of the cache read follows
_STEPS = 8  # of a run
_ROUNDS, _MOST_ROUNDS = 3, 60
_LEAST_SECONDS = 0.1  # timed of each kind of step: a single disturbance of short steps does not count
_TOKEN = 5


class Shape(NamedTuple):
    """Sequences that start together: how many, prompt tokens and new tokens of each."""

    batch: int
    prompt: int
    new: int


def step_seconds(backend: Backend, schedule: Schedule, shape: Shape) -> list[float]:
    """Seconds of each of the `new` - 1 decode steps of all sequences, behind keys and values that are filled in."""
    engine = open_engine(backend, schedule, shape)
    engine.skips_prefill = True
    first, *_ = engine.submit(_requests(shape))
    times: list[float] = []
    while engine.has_work:
        times += [out.seconds for out in engine.step() if out.request == first]
    return [after - before for before, after in pairwise(times)]


def prompt_seconds(backend: Backend, schedule: Schedule, batch: int, prompt: int) -> float:
    """Seconds of the prompts' forward, and of the choice of the first new tokens."""
    shape = Shape(batch, prompt, 1)
    engine = open_engine(backend, schedule, shape)
    engine.decode(_requests(shape))
    return engine.stats.step_seconds


def open_engine(backend: Backend, schedule: Schedule, shape: Shape) -> Engine:
    """An idle engine, whose prompts run in one forward, so that the sequences of a `shape` stay together."""
    if backend.fast is not None:
        _ = backend.fast.head.short  # makes the 8-bit copy of the head: no step is timed with it
    return backend.engine(schedule, max_rows=shape.batch, prompt_tokens=shape.batch * shape.prompt)


def _requests(shape: Shape) -> list[Request]:
    return [Request((_TOKEN,) * shape.prompt, shape.new, exact=False)] * shape.batch


class _Kind(NamedTuple):
    """Work that is timed: steps after cached tokens, or a forward over prompts; `rows` sequences of `tokens` tokens.

    `depth` layers run; in a prompt the other layers are projected.
    """

    work: Literal["step", "prompt"]
    rows: int
    tokens: int
    depth: int


def measure_cost(backend: Backend, *, batch: int = 1, prompt_len: int = 64, until: float = math.inf) -> CostModel:
    """Measure what steps of `batch` sequences and of one, behind `prompt_len` cached tokens, and prompts cost here.

    The lower quartile over some runs of each kind of work counts, or over fewer after `until`, of
    `time.perf_counter()`. Raises UsageError if the model has one layer only, or the text does not fit its context.
    """
    model = unwrap(backend.model)
    config = model.config.get_text_config(decoder=True)
    geometry = ModelGeometry.from_config(config)
    if (layers := geometry.num_layers) < 2:
        raise UsageError("a model of one layer has nothing to skip: give a model with 2 layers or more")
    order = lent_last(config, Schedule.constant(layers, layers, warmup_layers=0)).drop_order
    kinds = _kinds(batch, prompt_len, layers, len(order), _room(model, prompt_len + _STEPS + 2))
    watch = Stopwatch[_Kind, list[float]](kinds)
    with progress_bar((_ROUNDS + 1) * len(kinds), "run", name="calibrating") as bar:

        def seconds(kind: _Kind) -> list[float]:
            bar.update()
            return _seconds(kind, backend, order, splits=projects(config))

        for kind in kinds:  # to warm up
            seconds(kind)
        for done in range(_MOST_ROUNDS):
            if done and time.perf_counter() > until:
                break
            timed = (sum(map(sum, watch.laps(kind))) for kind in kinds if kind.work == "step")
            if done >= _ROUNDS and min(timed) >= _LEAST_SECONDS:
                break
            watch.lap(seconds)
    quiet = {kind: _quiet_seconds(watch.laps(kind)) for kind in kinds}
    # At step k the cache holds the prompt, the first token and k more tokens.
    grown = (_STEPS + 1) / 2 + 1
    steps = {(k.rows, k.depth, k.tokens + grown): s for k, s in quiet.items() if k.work == "step"}
    prompts = {(k.rows, k.tokens, k.depth): s for k, s in quiet.items() if k.work == "prompt"}
    return fitted(geometry, steps, prompts)


def _kinds(batch: int, prompt_len: int, layers: int, droppable: int, room: int) -> list[_Kind]:
    """The work to time: full, half and few layers; full depth after a longer text; prompts at full and half depth."""
    half, eighth = (max(depth, layers - droppable) for depth in ((layers + 1) // 2, layers // 8))
    depths = sorted({layers, half, eighth}, reverse=True)
    longer = prompt_len + min(_LONGER, room)
    kinds = []
    for rows in (1, batch):
        kinds += [_Kind("step", rows, prompt_len, depth) for depth in depths]
        kinds.append(_Kind("step", rows, longer, layers))
    for tokens in (prompt_len, min(batch * prompt_len, PROMPT_TOKENS)):
        size = max(1, tokens // prompt_len), min(tokens, prompt_len)
        kinds += [_Kind("prompt", *size, depth) for depth in (layers, half)]
    return list(dict.fromkeys(kinds))


def _seconds(kind: _Kind, backend: Backend, order: Sequence[int], *, splits: bool) -> list[float]:
    """Seconds of one prompt, or of each step of a run; `splits`: the model can project the upper layers of prompts."""
    layers, run = backend.num_layers, kind.depth
    schedule = Schedule.constant(layers, run, warmup_layers=0, prompt="max_exit", drop_order=order)
    if kind.work == "step":
        shape = Shape(kind.rows, kind.tokens + 1, _STEPS + 1)
        return step_seconds(backend, replace(schedule, prompt="full"), shape)
    if run < layers and splits:
        schedule = Schedule.split(layers, run, layers)
    return [prompt_seconds(backend, schedule, kind.rows, kind.tokens)]


def _quiet_seconds(runs: Sequence[Sequence[float]]) -> float:
    """Median over the steps of a run of each step's lower quartile over the runs.

    Other work only adds time, and a median over the runs would take it in once it disturbs half of them.
    """
    return float(statistics.median(sorted(times)[len(times) // 4] for times in zip(*runs, strict=True)))


def fitted(
    geometry: ModelGeometry,
    steps: Mapping[tuple[int, int, float], float],
    prompts: Mapping[tuple[int, int, int], float],
) -> CostModel:
    """The cost model that fits measured seconds, by least squares over the depths.

    `steps`: seconds of a step by its number of sequences, the layers that ran, and the cached tokens of a sequence.
    Each number of sequences needs two or more depths with equally many tokens, one of them full depth. Full depth after
    a longer text gives the cost of the cache read. `prompts`: seconds of a forward over prompts by their number, the
    tokens of each, and the lowest layers that run: all, and fewer, which gives the cost of projecting the others.

    Raises UsageError if depths are missing, or fewer layers took no less time.
    """
    steps_by_rows = [_fitted_step(geometry, rows, steps) for rows in sorted({rows for rows, _, _ in steps})]
    cost = CostModel(
        geometry.num_layers,
        steps_by_rows[-1][0].rows,
        tuple(step for step, _ in steps_by_rows),
        window=geometry.window,
        window_share=geometry.window_share,
        source="measured",
        residual=max(residual for _, residual in steps_by_rows),
    )
    sizes = {(rows, tokens) for rows, tokens, _ in prompts}
    return replace(cost, prompts=tuple(sorted(_fitted_prompt(cost, *size, prompts) for size in sizes)))


def _fitted_prompt(
    cost: CostModel, rows: int, tokens: int, prompts: Mapping[tuple[int, int, int], float]
) -> PromptCost:
    """A layer's share of full depth's time, and a projection's share of the time of fewer layers that is left."""
    full, last = cost.num_layers, cost.at(min(rows, cost.max_rows))
    by_depth = {run: took for (*size, run), took in prompts.items() if size == [rows, tokens]}
    layer = max(0.0, by_depth[full] - last.fixed_seconds) / full
    run = min(by_depth)
    above = (by_depth[run] - last.fixed_seconds - run * layer) / max(1, full - run) - last.layer_seconds
    projection = min(max(0.0, above), layer) if run < full else layer
    forwards = math.ceil(rows * tokens / PROMPT_TOKENS)
    return PromptCost(rows * tokens / forwards, layer / forwards, projection / forwards)


def _fitted_step(
    geometry: ModelGeometry, rows: int, steps: Mapping[tuple[int, int, float], float]
) -> tuple[StepCost, float]:
    """The parts of a step of `rows` rows, and the largest relative distance between the fit and a measurement."""
    full = geometry.num_layers
    of_rows = {(depth, tokens): seconds for (count, depth, tokens), seconds in steps.items() if count == rows}
    short, long = (pick(tokens for _, tokens in of_rows) for pick in (min, max))
    by_depth = {depth: seconds for (depth, tokens), seconds in of_rows.items() if tokens == short}
    if len(by_depth) < 2 or full not in by_depth:
        raise UsageError(f"steps of {list(by_depth)} layers: at least two depths, one of them {full}, are needed")
    layer, fixed = statistics.linear_regression(list(by_depth), list(by_depth.values()))
    if fixed < 0:
        layer, fixed = statistics.linear_regression(list(by_depth), list(by_depth.values()), proportional=True)
    if layer <= 0:
        raise UsageError("steps with fewer layers took no less time: measure again on a quieter machine")
    read, longer = (rows * tokens_read(tokens, geometry.window, geometry.window_share) for tokens in (short, long))
    kv = max(0.0, of_rows[full, long] - by_depth[full]) / (full * (longer - read)) if longer > read else 0.0
    # Noise must not make the cache read more expensive than the layer that it is a part of.
    kv = min(kv, layer / max(read, 1))
    residual = max(abs(fixed + layer * depth - seconds) / seconds for depth, seconds in by_depth.items())
    return StepCost(rows, fixed, max(0.0, layer - kv * read), kv), residual


def _room(model: Any, tokens: int) -> int:
    """Tokens that still fit the model's context after `tokens`."""
    context = context_length(model.config)
    if context is None:
        return _LONGER
    if tokens > context:
        raise UsageError(
            f"the model's context is {context} tokens, but the calibration takes {tokens}: lower prompt_len"
        )
    return context - tokens
