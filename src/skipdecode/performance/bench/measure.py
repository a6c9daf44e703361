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
from skipdecode.errors import UsageError
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


class _Times(NamedTuple):
    """Of each round, the seconds of a run's steps and of its prompts, the bandwidth and the rate of products."""

    seconds: list[float]
    prompts: list[float]
    bandwidth: list[float]
    products: list[float]

    @property
    def requests(self) -> list[float]:
        """Seconds of prompts and steps together; none where prompts were not timed."""
        return [sum(pair) for pair in zip(self.seconds, self.prompts, strict=False)]


def measure(
    peers: Sequence[Peer], workload: Workload, num_layers: int, device: torch.device, *, progress: bool = False
) -> dict[str, Any]:
    """Measure engines of one model on a device, whose bandwidth counts; `progress` shows a bar on stderr.

    Returns
    -------
    dict
        ``bandwidth_gb_s``, the median of all reads; ``products_gflop_s``, of products by type; ``rows``, one for each
        batch, prompt length, engine and nominal speed-up; ``notes``, lines on what could not be measured.
    """
    schedules = workload.schedules(num_layers)
    cells = [(Rows(*size, workload.new), _runs(peers, schedules, size[0])) for size in workload.sizes]
    found = []
    total = sum(len(runs) for _, runs in cells) * workload.rounds
    with progress_bar(total, "run", shown=progress) as bar:
        for rows, runs in cells:
            times = {run: _Times([], [], [], []) for run in runs}
            # An engine's schedules in a row, and every other round backwards: memory's speed may change within a round.
            order = sorted(runs, key=lambda run: peers.index(run.peer))
            for number in range(workload.rounds):
                rates = {kind: measure_products(kind, device) for kind in {run.peer.arithmetic for run in runs}}
                before = measure_bandwidth(device)
                for run in order[:: -1 if number % 2 else 1]:
                    times[run].seconds.append(run.peer.decode_seconds(run.schedule, rows))
                    if workload.prompts and run.peer.times_prompts:
                        times[run].prompts.append(run.peer.prompt_seconds(run.schedule, rows.batch, rows.prompt))
                    after = measure_bandwidth(device)
                    times[run].bandwidth.append((before + after) / 2)
                    times[run].products.append(rates[run.peer.arithmetic])
                    before = after
                    bar.update()
            found += [_row(rows, times, run) for run in runs]
    if not found:
        raise UsageError("; ".join(_notes(peers, workload)))
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
        "notes": _notes(peers, workload),
    }


def _runs(peers: Sequence[Peer], schedules: dict[float, Schedule], batch: int) -> list[_Run]:
    fit = [p for p in peers if p.max_batch is None or batch <= p.max_batch]
    return [_Run(p, n, p.suited(s)) for n, s in schedules.items() for p in fit if p.skips or n == 1]


def _notes(peers: Sequence[Peer], workload: Workload) -> list[str]:
    left_out = {p: [str(b) for b in workload.batches if p.max_batch is not None and b > p.max_batch] for p in peers}
    return [
        f"{peer.name} decodes {peer.max_batch} row at a time: not measured at batch {', '.join(batches)}"
        for peer, batches in left_out.items()
        if batches
    ]


def _row(rows: Rows, times: dict[_Run, _Times], run: _Run) -> dict[str, Any]:
    steps, peer = rows.new - 1, run.peer
    full = {r.peer.name: found for r, found in times.items() if r.nominal == 1}
    seconds, prompts, bandwidth, products = times[run]
    median = statistics.median(seconds)
    reference = next((full[name] for name in _REFERENCES if name in full), None)
    read, flops = peer.step_bytes(run.schedule, rows), peer.step_flops(run.schedule, rows)
    limits = [(read / b, flops / p) for b, p in zip(bandwidth, products, strict=True)]
    return {
        "engine": peer.name,
        "weights": peer.weights,
        **rows._asdict(),
        "nominal_speedup": run.nominal,
        "mean_layers": peer.mean_layers(run.schedule, rows),
        "request_speedup": _ratio(full[peer.name].requests, times[run].requests),
        "request_speedup_over_transformers": reference and _ratio(reference.requests, times[run].requests),
        "decode_tokens_per_s": rows.batch * steps / median,
        "ms_per_step": median / steps * 1e3,
        "decode_speedup": _ratio(full[peer.name].seconds, seconds),
        "speedup_over_transformers": reference and _ratio(reference.seconds, seconds),
        "amdahl_bound": peer.reads(rows.batch).speedup(run.schedule, rows.prompt, rows.new),
        "bytes_per_step": read,
        "flops_per_step": flops,
        "limit": "bytes" if statistics.median(a / b for a, b in limits) >= 1 else "arithmetic",
        "roofline_share": statistics.median(max(wall) / (s / steps) for s, wall in zip(seconds, limits, strict=True)),
        "seconds": seconds,
        "prompt_seconds": prompts,
        "bandwidth_gb_s": [b / 1e9 for b in bandwidth],
        "products_gflop_s": [p / 1e9 for p in products],
    }


def _ratio(over: list[float], under: list[float]) -> float | None:
    """The median of the rounds' ratios; None where there are none."""
    if not over or not under:
        return None
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
