"""Throughput and latency of a request stream or a batch job on modelled workers, at full depth and under a schedule.

The engine's scheduling runs without a model. The cost of a step is from cost models (--cost: files, or the output of
skipdecode plan --json, best at several batch sizes) or is predicted from the config of a model (--model). Not modelled:
the limit of KV memory, attention inside a prompt, noise. The results are predictions, not measurements.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.cli.columns import table
from skipdecode.cli.options import BASE, ScheduleOptions, choose_schedule, read_cost
from skipdecode.common.kinds import heading
from skipdecode.common.options import Reads, option
from skipdecode.errors import UsageError
from skipdecode.models.loading.hub import choose_device
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.performance import traces
from skipdecode.performance.cost import CostModel
from skipdecode.performance.simulation import Admission, best_refill_below, capacity, simulate
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skipdecode.performance.simulation import Simulation

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleOptions):
    """Options of `skipdecode simulate`."""

    NEEDS: ClassVar = ScheduleOptions.NEEDS | {
        "bandwidth": ("flops",),
        "flops": ("bandwidth",),
        "base": ("model",),
        "burst": ("rate", "load"),
        "acceptance": ("schedule", "nominal_speedup"),
    }
    EXCLUDES: ClassVar = ScheduleOptions.EXCLUDES | {"cost": ("model", "bandwidth"), "rate": ("load",)}

    cost: tuple[str, ...] = option(
        "cost models (JSON files), each for a different batch size; steps of other sizes are interpolated",
        default=(),
        path=Reads(),
    )
    base: str | None = option(BASE, default=None, path=Reads(model_files))
    model: str | None = option(
        "predict the cost from a config: a local directory, a hub id, smollm2-135m, or a JSON file",
        default=None,
        path=Reads(model_files),
    )
    bandwidth: float | None = option(
        "memory read bandwidth of a modelled worker, GB/s (default: measured on this machine)", default=None, above=0
    )
    flops: float | None = option("rate of a modelled worker's matrix products, GFLOP/s", default=None, above=0)
    policy: Admission = option(
        "when requests join the batch; static: sorted by length, all of a batch together; continuous: in order, at any "
        "free slot; refill: in order, when at most a quarter of the slots is in use",
        default="continuous",
    )
    refill_below: str | None = option(
        "for static and refill: share of slots in use below which the next requests join (defaults: 0 and 0.25); auto: "
        "the share at which the schedule finishes the most requests",
        default=None,
    )
    max_rows: int | None = option(
        "slots of a worker: most sequences in a batch (default: the largest batch of --cost; 8 with --model)",
        default=None,
        least=1,
    )
    acceptance: float | None = option(
        "simulate exact decoding: the schedule drafts tokens, and full depth accepts each with this chance",
        default=None,
        least=0,
        most=1,
    )
    workers: int = option("modelled workers; a request goes to the one with the least load", default=1, least=1)
    requests: int = option("number of requests", default=10000, least=1)
    rate: float | None = option(
        "requests per second for all workers (default, without --load: all requests arrive at once)",
        default=None,
        above=0,
    )
    load: float | None = option(
        "rate as a share of what the workers can finish at full depth; the same rate for the schedule",
        default=None,
        above=0,
    )
    burst: int = option("requests that arrive together", default=1, least=1)
    prompt_len: str = option(
        "prompt tokens: N, uniform:A:B, lognormal:MEDIAN:SIGMA, file:PATH (JSON list)", default="64"
    )
    new_tokens: str = option("new tokens, in the same format", default="64")
    limit: int | None = option(
        "most new tokens; the scheduler then knows only this limit (default: the scheduler knows each length)",
        default=None,
        least=1,
    )
    seed: int = option("seed of the random numbers", default=0)
    json: bool = option("print one JSON document", default=False)


@dataclass(frozen=True)
class _Run:
    """A simulated schedule, with the requests per second that arrive (None: all at once) and that can be finished."""

    schedule: Schedule
    rate: float | None
    capacity: float | None
    refill_below: float | None
    result: Simulation


def run(config: Config) -> int:
    """Simulate full depth and the schedule, and print the results."""
    if not config.cost and config.model is None:
        raise UsageError("no cost was given: give --cost with files, or --model")
    cost = _cost(config)
    chosen = choose_schedule(config, cost.num_layers, carried=None, default_seq_len=_positions(config)).schedule
    started = time.perf_counter()
    full = _simulated(config, cost, Schedule.full(cost.num_layers), None)
    runs = [full] if chosen.is_full else [full, _simulated(config, cost, chosen, full.capacity)]
    took = time.perf_counter() - started
    print(f"simulated in {took:.1f} s ({len(runs) * config.requests / took:.0f} requests/s)", file=sys.stderr)
    print(json.dumps(_document(config, runs), indent=2) if config.json else "\n".join(_table(runs)))
    return 0


def _cost(config: Config) -> CostModel:
    if config.model is None:
        return CostModel.joined([read_cost(path) for path in config.cost], config.max_rows)
    from skipdecode.performance.cost_source import find_geometry
    from skipdecode.performance.machine import Machine, measure_machine

    geometry, dtype = find_geometry(ModelRef(config.model, given_base=config.base), "auto", choose_device("cpu"))
    if config.bandwidth is None or config.flops is None:
        machine = measure_machine("cpu", dtype)
    else:
        machine = Machine(config.bandwidth * 1e9, config.flops * 1e9)
    rows = 8 if config.max_rows is None else config.max_rows
    return CostModel.predicted(geometry, machine, rows, range(1, rows + 1))


def _positions(config: Config) -> int:
    """Positions of a schedule without --seq-len: the mean output length of the first requests."""
    lengths = [a.new_tokens for a, _ in zip(_trace(config, None), range(1000), strict=False)]
    return max(1, round(sum(lengths) / len(lengths)))


def _trace(config: Config, rate: float | None, requests: int | None = None) -> Iterator[traces.Arrival]:
    times = None if rate is None else traces.bursts(rate, config.burst, config.seed)
    count = config.requests if requests is None else requests
    prompts, outputs = traces.parse_lengths(config.prompt_len), traces.parse_lengths(config.new_tokens)
    return traces.make_trace(count, times, prompts, outputs, limit=config.limit, seed=config.seed)


def _simulated(config: Config, cost: CostModel, schedule: Schedule, full_capacity: float | None) -> _Run:
    """The simulation of a schedule; `full_capacity` is that of full depth, None for full depth itself."""
    options: dict[str, Any] = {"max_rows": cost.batch, "policy": config.policy}
    if not schedule.is_full:
        options["acceptance"] = config.acceptance
    options["refill_below"] = share = _refill_share(config, cost, schedule, options)
    most, rate = None, config.rate
    if config.load is not None or config.rate is not None:
        endless = _trace(config, None, 1_000_000_000)
        most = config.workers * capacity(endless, cost, schedule, **options)
        if config.load is not None:
            rate = config.load * (full_capacity or most)
    trace = _trace(config, rate)
    result = simulate(trace, cost, schedule, workers=config.workers, **options)
    return _Run(schedule, rate, most, share, result)


def _refill_share(config: Config, cost: CostModel, schedule: Schedule, options: Mapping[str, Any]) -> float | None:
    """The share of --refill-below for a schedule; None for the default of the policy."""
    if config.refill_below is None:
        return None
    if config.policy == "continuous":
        raise UsageError(
            "--refill-below needs --policy static or refill: with continuous, every free slot is used at once"
        )
    if config.refill_below == "auto":
        return best_refill_below(list(_trace(config, None)), cost, schedule, **options)
    try:
        return float(config.refill_below)
    except ValueError:
        raise UsageError(
            f"--refill-below {config.refill_below} is not accepted: give a number from 0 to 1, or auto"
        ) from None


# ---------------------------------------------------------------------- report


def _document(config: Config, runs: list[_Run]) -> dict[str, object]:
    return {
        **heading("simulation"),
        "policy": config.policy,
        "seed": config.seed,
        "runs": [
            {"name": r.schedule.name, "schedule": r.schedule.to_dict(), "rate": r.rate, "capacity": r.capacity}
            | ({} if r.refill_below is None else {"refill_below": r.refill_below})
            | r.result.to_dict()
            for r in runs
        ],
    }


_FIGURES = {
    "requests/s finished": "{requests_per_s:.2f}",
    "tokens/s": "{tokens_per_s:.1f}",
    "workers busy": "{busy:.0%}",
    "slots in use": "{occupancy:.0%}",
    "sequences per step": "{rows_per_step:.2f} of {max_rows}",
    "layers per step": "{layers_per_step:.2f}",
    "layers per token": "{layers_per_token:.2f}",
}


def _table(runs: list[_Run]) -> list[str]:
    lines = [["requests/s offered", *("all at once" if r.rate is None else f"{r.rate:.2f}" for r in runs)]]
    if runs[0].capacity is not None:
        lines.append(["requests/s at most", *(f"{r.capacity:.2f}" for r in runs)])
    if runs[0].refill_below is not None:
        lines.append(["refill below", *(f"{r.refill_below:.1%} of slots" for r in runs)])
    documents = [r.result.to_dict() for r in runs]
    lines += [[name, *map(form.format_map, documents)] for name, form in _FIGURES.items()]
    for name, field in (("request", "request_s"), ("first token", "first_token_s"), ("inter-token", "inter_token_s")):
        for which in ("p50", "p99"):
            lines.append([f"{name} {which}, ms", *(f"{1e3 * each[field][which]:.2f}" for each in documents)])
    return [*table(["", *(r.schedule.name for r in runs)], lines), *(_gain(runs[0], other) for other in runs[1:])]


def _gain(full: _Run, other: _Run) -> str:
    """The gain over full depth: of capacity if a rate was given, as the finished requests are then the same."""
    name, nominal = other.schedule.name, f"(nominal {other.schedule.nominal_speedup:.2f}x)"
    if full.capacity is None or other.capacity is None:
        gain = other.result.requests_per_second / full.result.requests_per_second
        before, after = full.result.stats.after_prompts, other.result.stats.after_prompts
        decode = f"; decode {before / after:.2f}x" if after else ""
        return f"{name}: {gain:.2f}x the requests/s of full depth{decode} {nominal}"
    return f"{name}: {other.capacity / full.capacity:.2f}x the requests/s that full depth can finish {nominal}"
