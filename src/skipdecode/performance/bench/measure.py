"""Alternating measurement of engines and schedules on one model, in one process; every figure next to its limit.

Limits come from bytes: what the steps must read (weights of the layers that run, head, cache), and the bandwidth of a
large read in the same process, on the same threads, before and after each run. Memory that is shared with other users
of a machine gives by turns more and less, so shares and ratios are formed within a round; medians over rounds count.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from skipdecode.performance.bench.peers import Peer
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.machine import measure_bandwidth
from skipdecode.schedule import Schedule

__all__ = ["measure"]

_REFERENCES = ("transformers", "gated")


class _Run(NamedTuple):
    """What is timed: an engine at a nominal speed-up."""

    peer: Peer
    nominal: float


class _Cell(NamedTuple):
    """The measurements of one batch size and prompt length."""

    batch: int
    prompt: int
    new: int
    seconds: dict[_Run, list[float]]
    bandwidth: dict[_Run, list[float]]
    bytes: dict[_Run, float]
    layers: dict[_Run, float]


def measure(
    peers: Sequence[Peer], workload: Workload, num_layers: int, device: torch.device, *, progress: bool = False
) -> dict[str, Any]:
    """Measure engines of one model on a device, whose bandwidth counts; `progress` shows a bar on stderr.

    Returns
    -------
    dict
        ``bandwidth_gb_s``, the median of all reads; ``rows``, one for each batch, prompt length, engine and nominal
        speed-up; ``notes``, lines on what could not be measured.
    """
    schedules = workload.schedules(num_layers)
    cells = []
    total = sum(len(_runs(peers, schedules, batch)) for batch, _ in workload.sizes) * workload.rounds
    with tqdm(total=total, unit="run", disable=None if progress else True) as bar:
        for batch, prompt in workload.sizes:
            runs = _runs(peers, schedules, batch)
            cell = _Cell(batch, prompt, workload.new, {run: [] for run in runs}, {run: [] for run in runs}, {}, {})
            for peer in dict.fromkeys(run.peer for run in runs):
                peer.prepare(batch, prompt, workload.new)
            # An engine's schedules in a row, and every other round backwards: memory's speed may change within a round.
            order = sorted(runs, key=lambda run: peers.index(run.peer))
            for number in range(workload.rounds):
                before = measure_bandwidth(device)
                for run in order[:: -1 if number % 2 else 1]:
                    schedule = run.peer.suited(schedules[run.nominal])
                    cell.seconds[run].append(run.peer.decode_seconds(schedule))
                    after = measure_bandwidth(device)
                    cell.bandwidth[run].append((before + after) / 2)
                    before = after
                    cell.bytes[run] = run.peer.step_bytes(schedule, batch, prompt, workload.new)
                    cell.layers[run] = run.peer.mean_layers(schedule, workload.steps)
                    bar.update()
            cells.append(cell)
    rows = [_row(cell, run, run.peer.suited(schedules[run.nominal])) for cell in cells for run in cell.seconds]
    bandwidth = statistics.median(b for row in rows for b in row["bandwidth_gb_s"])
    return {"bandwidth_gb_s": bandwidth, "rows": rows, "notes": _notes(peers, workload)}


def _runs(peers: Sequence[Peer], schedules: dict[float, Schedule], batch: int) -> list[_Run]:
    fit = [p for p in peers if p.max_batch is None or batch <= p.max_batch]
    return [_Run(p, n) for n in schedules for p in fit if p.skips or n == 1]


def _notes(peers: Sequence[Peer], workload: Workload) -> list[str]:
    left_out = {p: [str(b) for b in workload.batches if p.max_batch is not None and b > p.max_batch] for p in peers}
    return [
        f"{peer.name} decodes {peer.max_batch} row at a time: not measured at batch {', '.join(batches)}"
        for peer, batches in left_out.items()
        if batches
    ]


def _row(cell: _Cell, run: _Run, schedule: Schedule) -> dict[str, Any]:
    batch, prompt, new = cell.batch, cell.prompt, cell.new
    steps = new - 1
    by_name = {(r.peer.name, r.nominal): values for r, values in cell.seconds.items()}
    seconds, bandwidth = cell.seconds[run], cell.bandwidth[run]
    median = statistics.median(seconds)
    reference = next((by_name[name, 1.0] for name in _REFERENCES if (name, 1.0) in by_name), None)
    shares = [cell.bytes[run] / b / (s / steps) for s, b in zip(seconds, bandwidth, strict=True)]
    return {
        "engine": run.peer.name,
        "weights": run.peer.weights,
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "nominal_speedup": run.nominal,
        "mean_layers": cell.layers[run],
        "decode_tokens_per_s": batch * steps / median,
        "ms_per_step": median / steps * 1e3,
        "decode_speedup": _ratio(by_name[run.peer.name, 1.0], seconds),
        "speedup_over_transformers": None if reference is None else _ratio(reference, seconds),
        "amdahl_bound": run.peer.reads(batch).speedup(schedule, prompt, new),
        "bytes_per_step": cell.bytes[run],
        "roofline_share": statistics.median(shares),
        "seconds": seconds,
        "bandwidth_gb_s": [b / 1e9 for b in bandwidth],
    }


def _ratio(over: list[float], under: list[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
