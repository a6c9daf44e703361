"""Throughput and latency of a stream or a batch job on modelled workers, full depth next to a schedule.

Runs the engine's scheduling without a model: what a step costs comes from cost models (--cost: files, or the output of
skipdecode plan --json, best at several batch sizes) or is predicted from a model's config (--model). Nothing is loaded
or generated. Not modelled: the limit on KV memory, attention inside a prompt, noise. Predictions, not measurements.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skipdecode.cli.columns import table
from skipdecode.cli.options import ScheduleOptions, choose_schedule, named_schedule, read_cost
from skipdecode.common.kinds import heading
from skipdecode.common.options import Reads, option
from skipdecode.errors import UsageError
from skipdecode.models.loading.hub import choose_device
from skipdecode.models.loading.ref import ModelRef, model_files
from skipdecode.performance import traces
from skipdecode.performance.cost import CostModel
from skipdecode.performance.simulation import Admission, best_join_below, capacity, simulate
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skipdecode.performance.simulation import Simulation

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleOptions):
    """Options of `skipdecode simulate`."""

    schedule: str | None = option(
        "schedule file (JSON; skipdecode plan writes one); without it and --nominal-speedup only full depth is run",
        default=None,
        path=Reads(),
    )
    seq_len: int | None = option(
        "positions over which --nominal-speedup lowers the depth (default: the mean length of the output)",
        default=None,
        least=1,
    )
    cost: tuple[str, ...] = option(
        "cost models (JSON files), each of another batch size; steps between are interpolated", default=(), path=Reads()
    )
    model: str | None = option(
        "predict the cost instead, from the config of a local directory, a hub id, smollm2-135m, or a JSON file",
        default=None,
        path=Reads(model_files),
    )
    bandwidth: float | None = option(
        "GB/s that a modelled worker reads (default: this machine's, measured)", default=None, above=0
    )
    flops: float | None = option(
        "GFLOP/s of a modelled worker's matrix product; goes with --bandwidth", default=None, above=0
    )
    policy: Admission = option(
        "waves: sorted by length, start together; continuous: fill every free row at once, in order; cohort: join in "
        "order when a quarter of the rows is left",
        default="continuous",
    )
    join_below: str | None = option(
        "with waves or cohort: share of the rows below which the next requests join (default: 0 and 0.25); auto: the "
        "share with which a schedule finishes the most requests",
        default=None,
    )
    max_rows: int | None = option(
        "most rows of a worker (default: the largest batch of --cost; 8 with --model)", default=None, least=1
    )
    workers: int = option("modelled workers; a request goes to the least loaded", default=1, least=1)
    requests: int = option("requests of the trace", default=10000, least=1)
    rate: float | None = option(
        "requests a second over all workers (default, without --load: all requests come at once)", default=None, above=0
    )
    load: float | None = option(
        "rate as a share of what the workers can finish at full depth; the schedule gets the same rate",
        default=None,
        above=0,
    )
    burst: int = option("requests that come together", default=1, least=1)
    prompt_len: str = option(
        "prompt tokens: N, uniform:A:B, lognormal:MEDIAN:SIGMA, file:PATH (JSON list)", default="64"
    )
    new_tokens: str = option("new tokens, in the same words", default="64")
    limit: int | None = option(
        "most new tokens; all that the scheduler knows of a length (default: it knows each length)",
        default=None,
        least=1,
    )
    seed: int = option("of the random numbers", default=0)
    json: bool = option("print one JSON document", default=False)


@dataclass(frozen=True)
class _Run:
    """One column of the table: requests a second that are offered (None: all at once), and that can be finished."""

    schedule: Schedule
    rate: float | None
    capacity: float | None
    join_below: float | None
    result: Simulation


def run(config: Config) -> int:
    """Simulate full depth and the schedule, and print both."""
    _check(config)
    cost = _cost(config)
    chosen = choose_schedule(config, cost.num_layers, carried=None, default_seq_len=_positions(config)).schedule
    started = time.perf_counter()
    full = _simulated(config, cost, Schedule.full(cost.num_layers), None)
    runs = [full] if chosen.is_full else [full, _simulated(config, cost, chosen, full.capacity)]
    took = time.perf_counter() - started
    print(f"simulated in {took:.1f} s ({len(runs) * config.requests / took:.0f} requests/s)", file=sys.stderr)
    print(json.dumps(_document(config, runs), indent=2) if config.json else "\n".join(_table(runs)))
    return 0


def _check(config: Config) -> None:
    named_schedule(config)
    if bool(config.cost) == (config.model is not None):
        raise UsageError("a cost is needed: give either --cost with files, or --model with a config")
    if (config.bandwidth is None) != (config.flops is None):
        raise UsageError("--bandwidth and --flops describe one machine: give both, or neither")
    if config.cost and config.bandwidth is not None:
        raise UsageError("--bandwidth and --flops go with --model: files of --cost say what steps take")
    if config.rate is not None and config.load is not None:
        raise UsageError("--rate and --load both say how many requests come: give one of them")
    if config.burst > 1 and config.rate is None and config.load is None:
        raise UsageError("--burst needs --rate or --load: without one all requests come at once")


# ---------------------------------------------------------------------- cost


def _cost(config: Config) -> CostModel:
    if config.model is None:
        return CostModel.joined([read_cost(path) for path in config.cost], config.max_rows)
    from skipdecode.performance.cost_source import find_geometry
    from skipdecode.performance.machine import Machine, measure_machine

    geometry, dtype = find_geometry(ModelRef(config.model), "auto", choose_device("cpu"))
    if config.bandwidth is None or config.flops is None:
        machine = measure_machine("cpu", dtype)
    else:
        machine = Machine(config.bandwidth * 1e9, config.flops * 1e9)
    rows = 8 if config.max_rows is None else config.max_rows
    return CostModel.predicted(geometry, machine, rows, range(1, rows + 1))


# ---------------------------------------------------------------------- trace


def _positions(config: Config) -> int:
    """Positions of a schedule without --seq-len: of the mean output of the trace's first requests."""
    lengths = [a.new_tokens for a, _ in zip(_trace(config, None), range(1000), strict=False)]
    return max(1, round(sum(lengths) / len(lengths)))


def _trace(config: Config, rate: float | None, requests: int | None = None) -> Iterator[traces.Arrival]:
    times = None if rate is None else traces.bursts(rate, config.burst, config.seed)
    count = config.requests if requests is None else requests
    prompts, outputs = traces.parse_lengths(config.prompt_len), traces.parse_lengths(config.new_tokens)
    return traces.make_trace(count, times, prompts, outputs, limit=config.limit, seed=config.seed)


def _simulated(config: Config, cost: CostModel, schedule: Schedule, full_capacity: float | None) -> _Run:
    """One run; `full_capacity` is full depth's, None for that itself."""
    policy, rows = config.policy, cost.batch
    share = _join_share(config, cost, schedule)
    most, rate = None, config.rate
    if config.load is not None or config.rate is not None:
        endless = _trace(config, None, 1_000_000_000)
        most = config.workers * capacity(endless, cost, schedule, max_rows=rows, policy=policy, join_below=share)
        if config.load is not None:
            rate = config.load * (full_capacity or most)
    trace = _trace(config, rate)
    result = simulate(trace, cost, schedule, max_rows=rows, policy=policy, join_below=share, workers=config.workers)
    return _Run(schedule, rate, most, share, result)


def _join_share(config: Config, cost: CostModel, schedule: Schedule) -> float | None:
    """`join_below` of --policy for a schedule; None: the policy's own."""
    if config.join_below is None:
        return None
    if config.policy == "continuous":
        raise UsageError("--join-below goes with --policy waves or cohort: continuous fills every free row at once")
    if config.join_below == "auto":
        arrivals = list(_trace(config, None))
        return best_join_below(arrivals, cost, schedule, max_rows=cost.batch, policy=config.policy)
    try:
        return float(config.join_below)
    except ValueError:
        raise UsageError(
            f"--join-below {config.join_below} is not accepted: give a number from 0 to 1, or auto"
        ) from None


# ---------------------------------------------------------------------- report


def _document(config: Config, runs: list[_Run]) -> dict[str, object]:
    return {
        **heading("simulation"),
        "policy": config.policy,
        "seed": config.seed,
        "runs": [
            {"name": r.schedule.name, "schedule": r.schedule.to_dict(), "rate": r.rate, "capacity": r.capacity}
            | ({} if r.join_below is None else {"join_below": r.join_below})
            | r.result.to_dict()
            for r in runs
        ],
    }


def _table(runs: list[_Run]) -> list[str]:
    lines: list[list[str]] = [["", *(r.schedule.name for r in runs)]]
    results = [r.result for r in runs]
    lines.append(["requests/s offered", *("all at once" if r.rate is None else f"{r.rate:.2f}" for r in runs)])
    if runs[0].capacity is not None:
        lines.append(["requests/s at most", *(f"{r.capacity:.2f}" for r in runs)])
    if runs[0].join_below is not None:
        lines.append(["next rows join below", *(f"{r.join_below:.1%} of rows" for r in runs)])
    figures = {
        "requests/s finished": "{0.requests_per_second:.2f}",
        "tokens/s": "{0.tokens_per_second:.1f}",
        "time with any row": "{0.busy:.0%}",
        "rows in use": "{0.occupancy:.0%}",
        "rows per step": "{0.rows_per_step:.2f} of {0.max_rows}",
        "layers per step": "{0.layers_per_step:.2f}",
        "layers per token": "{0.layers_per_token:.2f}",
    }
    lines += [[name, *map(form.format, results)] for name, form in figures.items()]
    documents = [s.to_dict() for s in results]
    for name, field in (("request", "request_s"), ("first token", "first_token_s"), ("inter-token", "inter_token_s")):
        for which in ("p50", "p99"):
            lines.append([f"{name} {which}, ms", *(f"{1e3 * each[field][which]:.2f}" for each in documents)])
    return [*table(lines[0], lines[1:]), *(_gain(runs[0], other) for other in runs[1:])]


def _gain(full: _Run, other: _Run) -> str:
    """What a schedule buys: in a stream that both can serve the rates are the same, so there capacity counts."""
    name, nominal = other.schedule.name, f"(nominal {other.schedule.nominal_speedup:.2f}x)"
    if full.capacity is None or other.capacity is None:
        gain = other.result.requests_per_second / full.result.requests_per_second
        before, after = full.result.stats.after_prompts, other.result.stats.after_prompts
        decode = f"; decode {before / after:.2f}x" if after else ""
        return f"{name}: {gain:.2f}x the requests/s of full depth{decode} {nominal}"
    return f"{name}: {other.capacity / full.capacity:.2f}x the requests/s that full depth can serve {nominal}"
