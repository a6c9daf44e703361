"""Alternating measurement of engines and schedules on one model, in one process; every figure next to its limit.

A step's limit is the longer of two times: its bytes (weights of the layers that run, head, cache) over the bandwidth
of a large read, before and after each run, and its operations over the rate of a large product in the type that the
engine multiplies, in each round; in the same process, on the same threads. Memory that is shared with other users of a
machine gives by turns more and less, so shares and ratios are formed within a round; medians over rounds count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from skipdecode.common.progress import progress_bar
from skipdecode.common.stopwatch import Stopwatch
from skipdecode.performance.bench.peers import Peer, Rows
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.machine import measure_bandwidth, measure_products
from skipdecode.schedule import Schedule

__all__ = ["measure"]

_REFERENCES = ("transformers", "gated")


class _Run(NamedTuple):
    """What is timed: an engine at a nominal speed-up, under the schedule that it runs there."""

    peer: Peer
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


def measure(
    peers: Sequence[Peer], workload: Workload, num_layers: int, device: torch.device, *, progress: bool = False
) -> dict[str, Any]:
    """Measure engines of one model on a device, whose bandwidth counts; `progress` shows a bar on stderr.

    Returns
    -------
    dict
        ``bandwidth_gb_s``, the median of all reads; ``products_gflop_s``, of products by type; ``rows``, one for each
        batch, prompt length, engine and nominal speed-up.
    """
    schedules = workload.schedules(num_layers)
    cells = [(Rows(*size, workload.new), _runs(peers, schedules)) for size in workload.sizes]
    found = []
    total = sum(len(runs) for _, runs in cells) * workload.rounds
    with progress_bar(total, "run", shown=progress) as bar:
        for rows, runs in cells:
            # An engine's schedules in a row: memory's speed may change within a round.
            watch = _Watch(sorted(runs, key=lambda run: peers.index(run.peer)))
            for _ in range(workload.rounds):
                rates = {kind: measure_products(kind, device) for kind in {run.peer.arithmetic for run in runs}}
                reads = [measure_bandwidth(device)]

                def lap(run: _Run, rows: Rows = rows, rates: Any = rates, reads: Any = reads) -> _Lap:
                    steps = run.peer.decode_seconds(run.schedule, rows)
                    timed = workload.prompts and run.peer.times_prompts
                    prompts = run.peer.prompt_seconds(run.schedule, rows.batch, rows.prompt) if timed else None
                    reads.append(measure_bandwidth(device))
                    bar.update()
                    return _Lap(steps, prompts, sum(reads[-2:]) / 2, rates[run.peer.arithmetic])

                watch.lap(lap)
            found += [_row(rows, watch, run) for run in runs]
    bandwidth = statistics.median(b for row in found for b in row["bandwidth_gb_s"])
    kinds = {peer.name: peer.arithmetic for peer in peers}
    products = {
        kind: statistics.median(p for row in found if kinds[row["engine"]] == kind for p in row["products_gflop_s"])
        for kind in dict.fromkeys(kinds[row["engine"]] for row in found)
    }
    return {
        "bandwidth_gb_s": bandwidth,
        "products_gflop_s": products,
        "rows": found,
    }


def _runs(peers: Sequence[Peer], schedules: dict[float, Schedule]) -> list[_Run]:
    return [_Run(p, n, s) for n, s in schedules.items() for p in peers if p.skips or n == 1]


def _row(rows: Rows, watch: _Watch, run: _Run) -> dict[str, Any]:
    steps, peer, laps = rows.new - 1, run.peer, watch.laps(run)
    full = {r.peer.name: r for r in watch.sides if r.nominal == 1}
    reference = next((full[name] for name in _REFERENCES if name in full), None)
    median = watch.seconds(run, lambda lap: lap.steps)
    read, flops = peer.step_bytes(run.schedule, rows), peer.step_flops(run.schedule, rows)
    limits = [(read / lap.bandwidth, flops / lap.products) for lap in laps]
    return {
        "engine": peer.name,
        "weights": peer.weights,
        **rows._asdict(),
        "nominal_speedup": run.nominal,
        "mean_layers": run.schedule.mean_budget(steps),
        "request_speedup": _request_speedup(watch, full[peer.name], run),
        "request_speedup_over_transformers": _request_speedup(watch, reference, run),
        "decode_tokens_per_s": rows.batch * steps / median,
        "ms_per_step": median / steps * 1e3,
        "decode_speedup": watch.ratio(full[peer.name], run, lambda lap: lap.steps),
        "speedup_over_transformers": reference and watch.ratio(reference, run, lambda lap: lap.steps),
        "amdahl_bound": peer.reads(rows.batch).speedup(run.schedule, rows.prompt, rows.new),
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
