"""Alternating measurement of engines and schedules on one model, in one process; every figure next to its limit.

Limits come from bytes: what the steps must read (weights of the layers that run, head, cache), and the bandwidth of a
large read in the same process, on the same threads, between the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from skipdecode.bench.machine import measure_bandwidth
from skipdecode.bench.peers import Peer
from skipdecode.bench.workload import Workload
from skipdecode.cost import CostModel, Machine
from skipdecode.geometry import ModelGeometry
from skipdecode.schedule import Schedule

__all__ = ["measure"]

Timings = dict[tuple[str, float], list[float]]


def measure(model: Any, peers: Sequence[Peer], workload: Workload, *, progress: bool = False) -> dict[str, Any]:
    """``bandwidth_gb_s`` (median of the run) and ``rows``, one for each batch, engine and nominal speed-up.

    Parameters
    ----------
    model : transformers causal LM
        That the peers run.
    peers : sequence of Peer
    workload : Workload
    progress : bool
        Show a progress bar on stderr.
    """
    geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)
    schedules = workload.schedules(geometry.num_layers)
    runs = [(p, n) for n in schedules for p in peers if p.skips or n == 1]
    reads: list[float] = []
    timings: dict[int, Timings] = {}
    total = len(runs) * workload.rounds * len(workload.batches)
    with tqdm(total=total, unit="run", disable=None if progress else True) as bar:
        for batch in workload.batches:
            for peer in peers:
                peer.prepare(batch, workload.prompt, workload.new)
            seconds: Timings = {(p.name, n): [] for p, n in runs}
            for _ in range(workload.rounds):
                reads.append(measure_bandwidth(model.device))
                for peer, nominal in runs:
                    seconds[peer.name, nominal].append(peer.decode_seconds(schedules[nominal]))
                    bar.update()
            timings[batch] = seconds
    bandwidth = statistics.median(reads)
    rows = [
        _row(geometry, workload, schedules[nominal], (batch, name, nominal), seconds, bandwidth)
        for batch, seconds in timings.items()
        for name, nominal in seconds
    ]
    return {"bandwidth_gb_s": bandwidth / 1e9, "rows": rows}


def _row(
    geometry: ModelGeometry,
    workload: Workload,
    schedule: Schedule,
    key: tuple[int, str, float],
    seconds: Timings,
    bandwidth: float,
) -> dict[str, Any]:
    batch, name, nominal = key
    median = statistics.median(seconds[name, nominal])
    # With one byte a second, seconds are bytes.
    reads = CostModel.predicted(geometry, Machine(1.0), batch)
    step_bytes = reads.sequence_seconds(schedule, workload.prompt, workload.new) / workload.steps
    peer = seconds.get(("transformers", 1.0)) or seconds.get(("gated", 1.0))
    return {
        "engine": name,
        "batch": batch,
        "nominal_speedup": nominal,
        "mean_layers": schedule.mean_budget(workload.steps),
        "decode_tokens_per_s": batch * workload.steps / median,
        "decode_speedup": statistics.median(seconds[name, 1.0]) / median,
        "speedup_over_transformers": None if peer is None else statistics.median(peer) / median,
        "amdahl_bound": reads.speedup(schedule, workload.prompt, workload.new),
        "bytes_per_step": step_bytes,
        "roofline_share": step_bytes / bandwidth / (median / workload.steps),
        "seconds": seconds[name, nominal],
    }
