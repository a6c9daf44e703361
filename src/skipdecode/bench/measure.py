"""Alternating measurement of engines and schedules on one model, in one process; every figure next to its limit.

Limits come from bytes: what the steps must read (weights of the layers that run, head, cache), and the bandwidth of a
large read in the same process, on the same threads, between the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from skipdecode.bench.machine import measure_bandwidth
from skipdecode.bench.peers.base import Peer
from skipdecode.bench.workload import Workload
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
    bytes: dict[_Run, float]
    layers: dict[_Run, float]


def measure(
    peers: Sequence[Peer], workload: Workload, num_layers: int, device: torch.device, *, progress: bool = False
) -> dict[str, Any]:
    """Measure.

    Parameters
    ----------
    peers : sequence of Peer
        Of one model.
    workload : Workload
    num_layers : int
        Of the model.
    device : torch.device
        Whose bandwidth counts.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    dict
        ``bandwidth_gb_s``, the median of the run; ``rows``, one for each batch, prompt length, engine and nominal
        speed-up; ``notes``, lines on what could not be measured.
    """
    schedules = workload.schedules(num_layers)
    reads: list[float] = []
    cells = []
    total = sum(len(_runs(peers, schedules, batch)) for batch, _ in workload.sizes) * workload.rounds
    with tqdm(total=total, unit="run", disable=None if progress else True) as bar:
        for batch, prompt in workload.sizes:
            runs = _runs(peers, schedules, batch)
            cell = _Cell(batch, prompt, workload.new, {run: [] for run in runs}, {}, {})
            for peer in dict.fromkeys(run.peer for run in runs):
                peer.prepare(batch, prompt, workload.new)
            for _ in range(workload.rounds):
                reads.append(measure_bandwidth(device))
                for run in runs:
                    schedule = schedules[run.nominal]
                    cell.seconds[run].append(run.peer.decode_seconds(schedule))
                    cell.bytes[run] = run.peer.step_bytes(schedule, batch, prompt, workload.new)
                    cell.layers[run] = run.peer.mean_layers(schedule, workload.steps)
                    bar.update()
            cells.append(cell)
    bandwidth = statistics.median(reads)
    rows = [_row(cell, run, schedules[run.nominal], bandwidth) for cell in cells for run in cell.seconds]
    return {"bandwidth_gb_s": bandwidth / 1e9, "rows": rows, "notes": _notes(peers, workload)}


def _runs(peers: Sequence[Peer], schedules: dict[float, Schedule], batch: int) -> list[_Run]:
    fit = [p for p in peers if p.max_batch is None or batch <= p.max_batch]
    return [_Run(p, n) for n in schedules for p in fit if p.skips or n == 1]


def _notes(peers: Sequence[Peer], workload: Workload) -> list[str]:
    notes = []
    for peer in peers:
        most = peer.max_batch
        left_out = [str(b) for b in workload.batches if most is not None and b > most]
        if left_out:
            notes.append(f"{peer.name} decodes {most} row at a time: not measured at batch {', '.join(left_out)}")
    return notes


def _row(cell: _Cell, run: _Run, schedule: Schedule, bandwidth: float) -> dict[str, Any]:
    batch, prompt, new = cell.batch, cell.prompt, cell.new
    steps = new - 1
    medians = {(r.peer.name, r.nominal): statistics.median(values) for r, values in cell.seconds.items()}
    peer, nominal = run
    median = medians[peer.name, nominal]
    reference = next((medians[name, 1.0] for name in _REFERENCES if (name, 1.0) in medians), None)
    return {
        "engine": peer.name,
        "weights": peer.weights,
        "batch": batch,
        "prompt": prompt,
        "new": new,
        "nominal_speedup": nominal,
        "mean_layers": cell.layers[run],
        "decode_tokens_per_s": batch * steps / median,
        "ms_per_step": median / steps * 1e3,
        "decode_speedup": medians[peer.name, 1.0] / median,
        "speedup_over_transformers": None if reference is None else reference / median,
        "amdahl_bound": peer.reads(batch).speedup(schedule, prompt, new),
        "bytes_per_step": cell.bytes[run],
        "roofline_share": cell.bytes[run] / bandwidth / (median / steps),
        "seconds": cell.seconds[run],
    }
