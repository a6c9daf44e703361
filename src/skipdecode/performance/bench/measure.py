"""Alternating measurement of engines and schedules on one model, in one process; every figure next to its limit.

A step's limit is the longer of two times: its bytes (weights of the layers that run, head, cache) over the bandwidth
of a large read, before and after each run, and its operations over the rate of a large product in the type that the
engine multiplies, in each round; in the same process, on the same threads. Other users of a machine change the speed
of its memory, so shares and ratios are formed within a round, and the median of the rounds counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, StaticCache

from skipdecode.common.progress import progress_bar
from skipdecode.common.stopwatch import Stopwatch
from skipdecode.engine.base import Engine
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.gated import repeat_first
from skipdecode.engine.generate import GenerateEngine
from skipdecode.engine.opening import Backend, GenerateBackend
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.models.release import model_cache_name
from skipdecode.performance.bench.workload import ENGINES, Workload
from skipdecode.performance.cost import CostModel, StepCost
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.machine import Machine, measure_bandwidth, measure_products
from skipdecode.performance.measure import Shape, open_engine, prompt_seconds, token_times
from skipdecode.schedule import Schedule

_BASELINES = ("transformers", "gated")


def open_backend(name: str, model: Any) -> Backend:
    """A backend by one of the names of `skipdecode.performance.bench.workload.ENGINES`.

    Raises UsageError if the name is not known, or the backend does not cover the model.
    """
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is not known: accepted are {', '.join(ENGINES)}")
    if name == "gated":
        return Backend(model, name=name)
    if name == "transformers":
        return GenerateBackend(model, name)
    if name == "transformers-static":
        return GenerateBackend(model, name, cache_implementation="static")
    kind: Any = name.partition("-")[2] or None
    try:
        return Backend(model, open_model(model, kind))
    except UnfitModelError as e:
        raise UsageError(f"the engine {name!r} does not cover this model: {e}; leave it out of --engines") from None


# ---------------------------------------------------------------------- steps


def open_filled(backend: Backend, schedule: Schedule, shape: Shape) -> Engine:
    """An idle engine whose decode steps are timed: it does not compute prompts."""
    if not isinstance(backend, GenerateBackend):
        return open_engine(backend, schedule, shape, fills_prompts=True)
    options = _filled_cache(backend.model, shape, dict(backend.options))
    return GenerateEngine(backend.model, max_rows=shape.batch, options=options)


def step_seconds(backend: Backend, schedule: Schedule, shape: Shape) -> list[float]:
    """Seconds of each of the `new` - 1 decode steps of all sequences, behind keys and values that are filled in."""
    return [after - before for before, after in pairwise(token_times(open_filled(backend, schedule, shape), shape))]


@torch.inference_mode()
def _filled_cache(model: Any, shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `generate` with a cache that holds all of the prompts but their last tokens."""
    cache: Any = DynamicCache(config=model.config)
    if options.pop("cache_implementation", None) == "static":
        cache = StaticCache(config=model.config, max_cache_len=shape.prompt + shape.new)
    name = model_cache_name(model)
    model(torch.full((shape.batch, 1), 5, device=model.device), use_cache=True, **{name: cache})
    if shape.prompt > 2:
        repeat_first(cache, shape.prompt - 2)
    return options | {name: cache}


class _Run(NamedTuple):
    """What is timed: a backend at a nominal speed-up, under the schedule that it runs there."""

    backend: Backend
    nominal: float
    schedule: Schedule


class _Lap(NamedTuple):
    """Of a round, the seconds of a run's steps and prompts (None: not timed), the bandwidth, the rate of products."""

    steps: float
    prompts: float | None
    bandwidth: float
    products: float

    @property
    def request(self) -> float:
        """Seconds of prompts and steps together."""
        return self.steps + (self.prompts or 0.0)


_Watch = Stopwatch[_Run, _Lap]


def measure(backends: Sequence[Backend], workload: Workload, *, progress: bool = False) -> dict[str, Any]:
    """Measure backends of one model on its device, whose bandwidth counts; `progress` shows a bar on stderr.

    Returns
    -------
    dict
        ``bandwidth_gb_s``, the median of all reads; ``products_gflop_s``, of products by type; ``rows``, one for each
        batch, prompt length, backend and nominal speed-up.
    """
    model = backends[0].model
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    runs = [
        _Run(backend, nominal, schedule)
        for nominal, schedule in workload.schedules(geometry.num_layers).items()
        for backend in backends
        if backend.runs_schedules or nominal == 1
    ]
    found = []
    with progress_bar(len(workload.sizes) * len(runs) * workload.rounds, "run", shown=progress) as bar:
        for size in workload.sizes:
            shape = Shape(*size, workload.new)
            for run in runs:
                if run.backend.warms_up:
                    step_seconds(run.backend, run.schedule, shape)
            # Schedules of one backend follow each other: memory's speed may change within a round.
            watch = _Watch(sorted(runs, key=lambda run: backends.index(run.backend)))
            for _ in range(workload.rounds):
                rates = {kind: measure_products(kind, model.device) for kind in {r.backend.arithmetic for r in runs}}
                reads = [measure_bandwidth(model.device)]

                def lap(run: _Run, shape: Shape = shape, rates: Any = rates, reads: Any = reads) -> _Lap:
                    steps = sum(step_seconds(run.backend, run.schedule, shape))
                    timed = workload.prompts and run.backend.times_prompts
                    prompts = prompt_seconds(run.backend, run.schedule, *shape[:2]) if timed else None
                    reads.append(measure_bandwidth(model.device))
                    bar.update()
                    return _Lap(steps, prompts, sum(reads[-2:]) / 2, rates[run.backend.arithmetic])

                watch.lap(lap)
            found += [_row(geometry, shape, watch, run) for run in runs]
    products: dict[str, list[float]] = {}
    kinds = {backend.name: backend.arithmetic for backend in backends}
    for row in found:
        products.setdefault(kinds[row["engine"]], []).extend(row["products_gflop_s"])
    return {
        "bandwidth_gb_s": statistics.median(b for row in found for b in row["bandwidth_gb_s"]),
        "products_gflop_s": {kind: statistics.median(rates) for kind, rates in products.items()},
        "rows": found,
    }


def step_reads(backend: Backend, geometry: ModelGeometry, batch: int) -> CostModel:
    """What a decode step of `batch` sequences must read, as a cost model whose seconds are bytes."""
    sizes, held = CostModel.predicted(geometry, Machine(1.0), batch), backend.step_bytes(batch)
    return sizes if held is None else replace(sizes, steps=(StepCost(batch, *held),))


def _step_flops(geometry: ModelGeometry, batch: int) -> CostModel:
    """Operations of a decode step, of products and of attention over the cache, as `step_reads`."""
    flops = batch * geometry.fixed_flops(), batch * geometry.layer_flops(), geometry.kv_flops_per_token()
    return CostModel.of_step(geometry.num_layers, batch, *flops)


def _row(geometry: ModelGeometry, shape: Shape, watch: _Watch, run: _Run) -> dict[str, Any]:
    steps, backend, laps = shape.new - 1, run.backend, watch.laps(run)
    full = {r.backend.name: r for r in watch.sides if r.nominal == 1}
    baseline = next((full[name] for name in _BASELINES if name in full), None)
    median = watch.seconds(run, lambda lap: lap.steps)
    costs = step_reads(backend, geometry, shape.batch), _step_flops(geometry, shape.batch)
    read, flops = (cost.sequence_seconds(run.schedule, *shape[1:]) / steps for cost in costs)
    limits = [(read / lap.bandwidth, flops / lap.products) for lap in laps]
    return {
        "engine": backend.name,
        "weights": backend.weights,
        **shape._asdict(),
        "nominal_speedup": run.nominal,
        "mean_layers": run.schedule.mean_budget(steps),
        "request_speedup": _request_speedup(watch, full[backend.name], run),
        "request_speedup_over_transformers": _request_speedup(watch, baseline, run),
        "decode_tokens_per_s": shape.batch * steps / median,
        "ms_per_step": median / steps * 1e3,
        "decode_speedup": watch.ratio(full[backend.name], run, lambda lap: lap.steps),
        "speedup_over_transformers": baseline and watch.ratio(baseline, run, lambda lap: lap.steps),
        "amdahl_bound": costs[0].speedup(run.schedule, *shape[1:]),
        "bytes_per_step": read,
        "flops_per_step": flops,
        "limit": "bytes" if statistics.median(a / b for a, b in limits) >= 1 else "arithmetic",
        "roofline_share": statistics.median(
            max(wall) / (lap.steps / steps) for lap, wall in zip(laps, limits, strict=True)
        ),
        "seconds": [lap.steps for lap in laps],
        "prompt_seconds": [lap.prompts for lap in laps if lap.prompts is not None],
        "bandwidth_gb_s": [lap.bandwidth / 1e9 for lap in laps],
        "products_gflop_s": [lap.products / 1e9 for lap in laps],
    }


def _request_speedup(watch: _Watch, over: _Run | None, run: _Run) -> float | None:
    """Of whole requests; None where there is nothing to compare with, or prompts were not timed."""
    if over is None or any(lap.prompts is None for side in (over, run) for lap in watch.laps(side)):
        return None
    return watch.ratio(over, run, lambda lap: lap.request)
