"""Throughput and latency of a stream or a batch job on modelled workers, full depth next to a schedule.

Runs the engine's scheduling without a model: what a step costs comes from cost models (--cost: files, or the output of
skipdecode plan --json, best at several batch sizes) or is predicted from a model's config (--model). Nothing is loaded
or generated. Not modelled: the limit on KV memory, attention inside a prompt, noise. Predictions, not measurements.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from skipdecode.cli.columns import table
from skipdecode.cli.options.option import option
from skipdecode.cli.options.schedule import ScheduleOptions, check_schedule_options, choose_schedule
from skipdecode.errors import DataError, UsageError
from skipdecode.performance.cost import CostModel, PromptCost
from skipdecode.performance.simulate.simulator import POLICIES, best_join_below, capacity, simulate
from skipdecode.performance.simulate.traces import all_at_once, bursts, make_trace, parse_lengths
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skipdecode.performance.simulate.simulator import Admission
    from skipdecode.performance.simulate.traces import Arrival
    from skipdecode.performance.simulate.worker import Simulation

__all__ = ["Config", "run"]


@dataclass(frozen=True, kw_only=True)
class Config(ScheduleOptions):
    """Options of `skipdecode simulate`."""

    schedule: str | None = option(
        "schedule file (JSON; skipdecode plan writes one); without it and --nominal-speedup only full depth is run",
        default=None,
    )
    seq_len: int | None = option(
        "positions over which --nominal-speedup lowers the depth (default: the mean length of the output)", default=None
    )
    cost: tuple[str, ...] = option(
        "cost models (JSON files), each of another batch size; steps between are interpolated", default=()
    )
    model: str | None = option(
        "predict the cost instead, from the config of a local directory, a hub id, smollm2-135m, or a JSON file",
        default=None,
    )
    bandwidth: float | None = option(
        "GB/s that a modelled worker reads (default: this machine's, measured)", default=None
    )
    flops: float | None = option("GFLOP/s of a modelled worker's matrix product; goes with --bandwidth", default=None)
    prompt_token_ms: float | None = option(
        "with --cost: milliseconds of one prompt token at full depth (default: what the files say, or as in a row of "
        "the largest batch, an upper bound)",
        default=None,
    )
    flat: bool = option("use the constant schedule of the same mean depth", default=False)
    policy: str = option(
        "waves: sorted by length, start together; continuous: fill every free row at once, in order; cohort: join in "
        "order when a quarter of the rows is left",
        default="continuous",
        choices=tuple(POLICIES),
    )
    join_below: str | None = option(
        "with waves or cohort: share of the rows below which the next requests join (default: 0 and 0.25); auto: the "
        "share with which a schedule finishes the most requests",
        default=None,
    )
    max_rows: int | None = option(
        "most rows of a worker (default: the largest batch of --cost; 8 with --model)", default=None
    )
    workers: int = option("modelled workers; a request goes to the least loaded", default=1)
    requests: int = option("requests of the trace", default=10000)
    rate: float | None = option(
        "requests a second over all workers (default, without --load: all requests come at once)", default=None
    )
    load: float | None = option("rate as a share of what the workers can finish; see --load-of", default=None)
    load_of: str = option(
        "full: both runs get the share of the full depth's capacity; own: each run gets the share of its own",
        default="full",
        choices=("full", "own"),
    )
    burst: int = option("requests that come together", default=1)
    prompt_len: str = option(
        "prompt tokens: N, uniform:A:B, lognormal:MEDIAN:SIGMA, file:PATH (JSON list)", default="64"
    )
    new_tokens: str = option("new tokens, in the same words", default="64")
    limit: int | None = option(
        "most new tokens; all that the scheduler knows of a length (default: it knows each length)", default=None
    )
    seed: int = option("of the random numbers", default=0)
    json: bool = option("print one JSON document", default=False)


@dataclass(frozen=True)
class _Run:
    """One column of the table."""

    name: str
    schedule: Schedule
    rate: float | None
    capacity: float | None
    join_below: float | None
    result: Simulation


def run(config: Config) -> int:
    """Simulate full depth and the schedule, and print both."""
    _check(config)
    cost = _cost(config)
    schedules = [Schedule.full(cost.num_layers)]
    chosen = choose_schedule(config, cost.num_layers, carried=None, default_seq_len=_positions(config)).schedule
    if config.flat:
        chosen = chosen.flattened()
    if not chosen.is_full:
        schedules.append(chosen)
    started = time.perf_counter()
    shares = _join_shares(config, cost, schedules)
    finished = _capacities(config, cost, schedules, shares)
    rates = _rates(config, finished)
    runs = [
        _Run(
            schedule.name,
            schedule,
            rate,
            most,
            share,
            simulate(
                _trace(config, rate),
                cost,
                schedule,
                max_rows=cost.batch,
                policy=cast("Admission", config.policy),
                join_below=share,
                workers=config.workers,
            ),
        )
        for schedule, rate, most, share in zip(schedules, rates, finished, shares, strict=True)
    ]
    took = time.perf_counter() - started
    print(f"simulated in {took:.1f} s ({len(runs) * config.requests / took:.0f} requests/s)", file=sys.stderr)
    print(json.dumps(_document(config, runs), indent=2) if config.json else "\n".join(_table(runs)))
    return 0


def _check(config: Config) -> None:
    check_schedule_options(config)
    if bool(config.cost) == (config.model is not None):
        raise UsageError("a cost is needed: give either --cost with files, or --model with a config")
    if (config.bandwidth is None) != (config.flops is None):
        raise UsageError("--bandwidth and --flops describe one machine: give both, or neither")
    if config.cost and config.bandwidth is not None:
        raise UsageError("--bandwidth and --flops go with --model: files of --cost say what steps take")
    if config.model is not None and config.prompt_token_ms is not None:
        raise UsageError("--prompt-token-ms goes with --cost: with --model it follows from --flops")
    if config.rate is not None and config.load is not None:
        raise UsageError("--rate and --load both say how many requests come: give one of them")
    if config.load is not None and not config.load > 0:
        raise UsageError(f"--load {config.load:g} is not accepted: give a number above 0, such as 0.8")
    if config.burst > 1 and config.rate is None and config.load is None:
        raise UsageError("--burst needs --rate or --load: without one all requests come at once")


# ---------------------------------------------------------------------- cost


def _cost(config: Config) -> CostModel:
    if config.model is not None:
        return _predicted(config, config.model)
    models = [_read_cost(Path(path)) for path in config.cost]
    cost = CostModel.joined(models, config.max_rows)
    if config.prompt_token_ms is None:
        return cost
    if not 0 <= config.prompt_token_ms < math.inf:
        raise UsageError(f"--prompt-token-ms {config.prompt_token_ms:g} is not accepted: give milliseconds, 0 or more")
    seconds = config.prompt_token_ms / 1e3 / cost.num_layers
    return replace(cost, prompts=(PromptCost.of_token(seconds, cost.at(1).layer_seconds),))


def _read_cost(path: Path) -> CostModel:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        plan = values.get("cost") if isinstance(values, dict) else None
        return CostModel.from_dict(values if plan is None else plan)
    except OSError as e:
        raise DataError(f"cannot read the cost model {path}: {e.strerror or e}") from None
    except ValueError as e:
        raise DataError(f"{path}: a cost model must be JSON: {e}") from None
    except DataError as e:
        raise DataError(f"{path}: {e}") from None


def _predicted(config: Config, name: str) -> CostModel:
    from skipdecode.performance.cost_source import find_geometry
    from skipdecode.performance.machine import Machine, measure_machine

    geometry, dtype = find_geometry(name)
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


def _trace(config: Config, rate: float | None, requests: int | None = None) -> Iterator[Arrival]:
    times = all_at_once() if rate is None else bursts(rate, config.burst, config.seed)
    prompts, outputs = parse_lengths(config.prompt_len), parse_lengths(config.new_tokens)
    count = config.requests if requests is None else requests
    return make_trace(count, times, prompts, outputs, limit=config.limit, seed=config.seed)


def _join_shares(config: Config, cost: CostModel, schedules: list[Schedule]) -> list[float | None]:
    """`join_below` for each schedule; None: the policy's own."""
    asked = config.join_below
    if asked is None:
        return [None] * len(schedules)
    if config.policy == "continuous":
        raise UsageError("--join-below goes with --policy waves or cohort: continuous fills every free row at once")
    if asked == "auto":
        arrivals = list(_trace(config, None))
        policy = cast("Admission", config.policy)
        return [best_join_below(arrivals, cost, s, max_rows=cost.batch, policy=policy) for s in schedules]
    try:
        return [float(asked)] * len(schedules)
    except ValueError:
        raise UsageError(f"--join-below {asked} is not accepted: give a number from 0 to 1, or auto") from None


def _capacities(
    config: Config, cost: CostModel, schedules: list[Schedule], shares: list[float | None]
) -> list[float | None]:
    """Requests a second that all workers can finish, for each schedule; None where all requests come at once."""
    if config.load is None and config.rate is None:
        return [None] * len(schedules)
    policy = cast("Admission", config.policy)
    endless = 1_000_000_000
    return [
        config.workers
        * capacity(_trace(config, None, endless), cost, s, max_rows=cost.batch, policy=policy, join_below=share)
        for s, share in zip(schedules, shares, strict=True)
    ]


def _rates(config: Config, finished: list[float | None]) -> list[float | None]:
    """Requests a second of each run; None: all at once."""
    load = config.load
    if load is None:
        return [config.rate] * len(finished)
    measured = finished if config.load_of == "own" else finished[:1] * len(finished)
    return [None if each is None else load * each for each in measured]


# ---------------------------------------------------------------------- report


def _document(config: Config, runs: list[_Run]) -> dict[str, object]:
    return {
        "policy": config.policy,
        "seed": config.seed,
        "runs": [
            {"name": r.name, "schedule": r.schedule.to_dict(), "rate": r.rate, "capacity": r.capacity}
            | ({} if r.join_below is None else {"join_below": r.join_below})
            | r.result.to_dict()
            for r in runs
        ],
    }


def _table(runs: list[_Run]) -> list[str]:
    lines: list[list[str]] = [["", *(r.name for r in runs)]]
    results = [r.result for r in runs]
    lines.append(["requests/s offered", *("all at once" if r.rate is None else f"{r.rate:.2f}" for r in runs)])
    if runs[0].capacity is not None:
        lines.append(["requests/s at most", *(f"{r.capacity:.2f}" for r in runs)])
    if runs[0].join_below is not None:
        lines.append(["next rows join below", *(f"{r.join_below:.1%} of rows" for r in runs)])
    figures = {
        "requests/s finished": lambda s: f"{s.requests_per_second:.2f}",
        "tokens/s": lambda s: f"{s.tokens_per_second:.1f}",
        "time with any row": lambda s: f"{s.busy:.0%}",
        "rows in use": lambda s: f"{s.occupancy:.0%}",
        "rows per step": lambda s: f"{s.rows_per_step:.2f} of {s.max_rows}",
        "layers per step": lambda s: f"{s.layers_per_step:.2f}",
        "layers per token": lambda s: f"{s.layers_per_token:.2f}",
    }
    lines += [[name, *map(show, results)] for name, show in figures.items()]
    documents = [s.to_dict() for s in results]
    for name, field in (("first token", "first_token_s"), ("inter-token", "inter_token_s"), ("request", "request_s")):
        for which in ("p50", "p99"):
            lines.append([f"{name} {which}, ms", *(f"{1e3 * each[field][which]:.2f}" for each in documents)])
    shown = table(lines[0], lines[1:])
    if len(runs) == 2:
        shown.append(_gain(*runs))
    return shown


def _gain(full: _Run, other: _Run) -> str:
    """What a schedule buys: in a stream that both can serve the tokens/s are the same, so there capacity counts."""
    nominal = f"(nominal {other.schedule.nominal_speedup:.2f}x)"
    if full.capacity is None or other.capacity is None:
        gain = other.result.tokens_per_second / full.result.tokens_per_second
        return f"{gain:.2f}x the tokens/s of full depth {nominal}"
    return f"{other.capacity / full.capacity:.2f}x the requests/s that full depth can serve {nominal}"
