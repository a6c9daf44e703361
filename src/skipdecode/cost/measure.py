"""Measures decode steps and prompts of a model on this machine, by sequences, layers and cached tokens.

Real steps of the package's own engine, or of transformers' forward, run under constant schedules. All kinds of step
take turns, so that a change of the machine's speed affects all of them. The time of a decode step depends on how many
tokens the cache holds, not on their values, so prompts are not computed before it (`Engine.fills_prompts`): they would
take most of a measurement.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
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
_LEAST_SECONDS = 0.1  # timed of each kind of step
_MOST_REPEATS = 20
_TOKEN = 5


def measure_cost(
    backend: Backend,
    *,
    batch: int = 1,
    prompt_len: int = 64,
    repeats: int = 3,
    steps: int = 8,
    progress: bool = False,
    until: float = math.inf,
) -> CostModel:
    """The cost model of a backend on this machine, for steps of `batch` sequences and of one.

    The lower quartile over `repeats` runs of each kind counts, or over fewer after `until`, of `time.perf_counter()`.
    For the other arguments and errors see `CostMeter`.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats} is not accepted: give 1 or more")
    prompts = (prompt_len, min(batch * prompt_len, PROMPT_TOKENS))
    meter = CostMeter(backend, rows={1, batch}, prompt_len=prompt_len, prompts=prompts, steps=steps)
    meter.run(repeats, _LEAST_SECONDS, progress=progress, until=until)
    return meter.cost()


class Shape(NamedTuple):
    """Sequences that start together: how many, prompt tokens and new tokens of each."""

    batch: int
    prompt: int
    new: int


def step_seconds(backend: Backend, schedule: Schedule, shape: Shape) -> list[float]:
    """Seconds of each of the `new` - 1 decode steps of all sequences, behind keys and values that are filled in."""
    engine = open_engine(backend, schedule, shape)
    engine.fills_prompts = True
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


class CostMeter:
    """Times steps and prompts of a model, round after round.

    If the speed of the machine changes, run some rounds before and some after the work that the cost is to predict.

    `rows` are numbers of sequences, each with `prompt_len` cached tokens when a run begins; `prompts` are tokens of
    prompts' forwards, in prompts of `prompt_len` tokens; `steps` are those of a run.

    Raises UsageError if a number is below 1, the model has one layer only, or the text does not fit its context.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        rows: Iterable[int] = (1,),
        prompt_len: int = 64,
        prompts: Iterable[int] = (64,),
        steps: int = 8,
    ) -> None:
        rows, prompts = sorted(set(rows)), sorted(set(prompts))
        for name, value in (("batch", min(rows)), ("prompt_len", prompt_len), ("steps", steps)):
            if value < 1:
                raise UsageError(f"{name}={value} is not accepted: give 1 or more")
        config = unwrap(backend.model).config.get_text_config(decoder=True)
        self._geometry, self._splits = ModelGeometry.from_config(config), projects(config)
        layers = self._geometry.num_layers
        self._lowest = lent_last(config, Schedule.constant(layers, layers, warmup_layers=0)).drop_order
        if layers < 2:
            raise UsageError("a model of one layer has nothing to skip: give a model with 2 layers or more")
        half, few = (max(depth, layers - len(self._lowest)) for depth in ((layers + 1) // 2, layers // 8))
        depths = {layers, half, few}
        more = min(_LONGER, _room(unwrap(backend.model), prompt_len + steps + 2))
        self._length = steps
        # At step k the cache holds the prompt, the first token and k more tokens.
        self._grown = (steps + 1) / 2 + 1
        # Full, half and few layers; full depth after a longer text.
        steps_of = [
            _Kind("step", count, tokens, depth)
            for count in rows
            for tokens in (prompt_len, *([prompt_len + more] if more else []))
            for depth in (sorted(depths, reverse=True) if tokens == prompt_len else (layers,))
        ]
        sizes = [(max(1, tokens // prompt_len), min(tokens, prompt_len)) for tokens in prompts]
        prompts_of = [_Kind("prompt", *size, depth) for size in sizes for depth in (layers, half)]
        self._watch = Stopwatch[_Kind, list[float]](dict.fromkeys([*steps_of, *prompts_of]))
        self._backend = backend

    def run(self, rounds: int, least_seconds: float = 0.0, *, progress: bool = False, until: float = math.inf) -> None:
        """Time every kind `rounds` times after a warm-up, and then until each was timed for `least_seconds` in total.

        Steps far below a millisecond are thus timed more often, so that a single disturbance does not count. After
        `until`, of `time.perf_counter()`, no round begins but the first.
        """
        kinds = self._watch.sides
        with progress_bar((rounds + 1) * len(kinds), "run", name="calibrating", shown=progress) as bar:

            def seconds(kind: _Kind) -> list[float]:
                bar.update()
                return self._seconds(kind)

            for kind in kinds:
                seconds(kind)
            for done in range(_MOST_REPEATS * rounds - 1):
                if done and time.perf_counter() > until:
                    break
                if done >= rounds and min(sum(self._all(k)) for k in kinds if k.work == "step") >= least_seconds:
                    break
                self._watch.lap(seconds)

    def _seconds(self, kind: _Kind) -> list[float]:
        """Seconds of one prompt, or of each step of a run."""
        layers, run = self._geometry.num_layers, kind.depth
        schedule = Schedule.constant(layers, run, warmup_layers=0, prompt="max_exit", drop_order=self._lowest)
        if kind.work == "step":
            shape = Shape(kind.rows, kind.tokens + 1, self._length + 1)
            return step_seconds(self._backend, replace(schedule, prompt="full"), shape)
        if run < layers and self._splits:
            schedule = Schedule.split(layers, run, layers)
        return [prompt_seconds(self._backend, schedule, kind.rows, kind.tokens)]

    def _all(self, kind: _Kind) -> list[float]:
        return [seconds for lap in self._watch.laps(kind) for seconds in lap]

    def cost(self) -> CostModel:
        """Fit the cost model to the quiet times of all rounds so far; UsageError before the first round."""
        if not self._watch.laps(self._watch.sides[0]):
            raise UsageError("nothing was timed yet: run a round first")
        quiet = {kind: _quiet_seconds(self._watch.laps(kind)) for kind in self._watch.sides}
        steps = {(k.rows, k.depth, k.tokens + self._grown): s for k, s in quiet.items() if k.work == "step"}
        prompts = {(k.rows, k.tokens, k.depth): s for k, s in quiet.items() if k.work == "prompt"}
        return fitted(self._geometry, steps, prompts)


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
    mine = {(depth, tokens): seconds for (count, depth, tokens), seconds in steps.items() if count == rows}
    short, long = (pick(tokens for _, tokens in mine) for pick in (min, max))
    by_depth = {depth: seconds for (depth, tokens), seconds in mine.items() if tokens == short}
    if len(by_depth) < 2 or full not in by_depth:
        raise UsageError(f"steps of {list(by_depth)} layers: at least two depths, one of them {full}, are needed")
    layer, fixed = statistics.linear_regression(list(by_depth), list(by_depth.values()))
    if fixed < 0:
        layer, fixed = statistics.linear_regression(list(by_depth), list(by_depth.values()), proportional=True)
    if layer <= 0:
        raise UsageError("steps with fewer layers took no less time: measure again on a quieter machine")
    read, longer = (rows * tokens_read(tokens, geometry.window, geometry.window_share) for tokens in (short, long))
    kv = max(0.0, mine[full, long] - by_depth[full]) / (full * (longer - read)) if longer > read else 0.0
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
