"""A simulation of the decode engine's scheduling, step by step: no model, no torch, no tensors.

A cost for every number of rows, a schedule and a request trace go in; throughput, latency
percentiles and layers per step come out. Admission is the engine's own `Scheduler` and the loop mirrors `Engine.step`,
so what is simulated is what runs. Memory grows by a number for every token put out.

Not modelled: time in Python and in sampling beyond the cost's fixed part, the limit on KV memory, a prefix cache, the
forwards of their own that all prompts have on a GPU, attention inside a prompt, noise. A result is only as good as its
cost model: compare it with a real run before relying on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from skipdecode.engine.scheduler import Scheduler
from skipdecode.errors import UsageError
from skipdecode.performance.cost import CostModel
from skipdecode.performance.simulate.traces import Arrival
from skipdecode.performance.simulate.worker import Simulation, Worker
from skipdecode.schedule import Schedule

__all__ = ["POLICIES", "Admission", "best_join_below", "capacity", "new_scheduler", "simulate"]

Admission = Literal["waves", "continuous", "cohort"]
POLICIES: dict[Admission, tuple[float, bool]] = {
    "waves": (0.0, False),
    "continuous": (1.0, True),
    "cohort": (0.25, True),
}
"""By name: `join_below` and `in_order` of `Scheduler`. A cohort joins when a quarter of the rows is left."""

_SATURATING = 64  # requests a row with which `capacity` is found
_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the rows, tried by `best_join_below`; the last is continuous batching


def new_scheduler(policy: Admission, max_rows: int, join_below: float | None = None) -> Scheduler:
    """The engine's scheduler with the settings of a policy's name; `join_below` in place of the policy's own."""
    if policy not in POLICIES:
        raise UsageError(f"policy={policy!r} is not accepted: give one of {', '.join(POLICIES)}")
    own, in_order = POLICIES[policy]
    return Scheduler(max_rows, own if join_below is None else join_below, in_order=in_order)


def simulate(
    trace: Iterable[Arrival],
    cost: CostModel,
    schedule: Schedule,
    *,
    max_rows: int = 8,
    policy: Admission = "continuous",
    join_below: float | None = None,
    workers: int = 1,
    prompt_chunk: int = 512,
) -> Simulation:
    """Run a trace to its end on identical workers; each request goes to the one with the fewest unfinished requests.

    Parameters
    ----------
    trace : iterable of Arrival
        In order of arrival. Read as it goes.
    schedule : Schedule
        Layers of each row and position.
    max_rows : int
        Most rows of a worker.
    policy, join_below
        Who joins when; see `new_scheduler`.
    prompt_chunk : int
        Most prompt tokens of one forward; the engine's is the default.

    Raises
    ------
    UsageError
        If a value is out of range, or the trace is not in order.
    ScheduleError
        If schedule and cost are for different numbers of layers.
    """
    schedule.check_fits(cost.num_layers)
    for name, value in (("workers", workers), ("prompt_chunk", prompt_chunk)):
        if value < 1:
            raise UsageError(f"{name}={value} is not accepted: give 1 or more")
    if max_rows > cost.max_rows:
        raise UsageError(f"max_rows={max_rows} is not accepted: the cost is known for up to {cost.max_rows} rows")
    schedulers = [new_scheduler(policy, max_rows, join_below) for _ in range(workers)]
    result = Simulation(workers, max_rows)
    began, ended = _run(trace, [Worker(cost, schedule, each, result, prompt_chunk) for each in schedulers])
    result.seconds = ended - began
    return result


def capacity(
    arrivals: Iterable[Arrival],
    cost: CostModel,
    schedule: Schedule,
    *,
    max_rows: int = 8,
    policy: Admission = "continuous",
    join_below: float | None = None,
) -> float:
    """Requests a second that one worker finishes when it never waits for any.

    `arrivals` gives the lengths (its times do not count); some tens of requests for every row are read.
    """
    needed = _SATURATING * max_rows
    trace = (arrival._replace(seconds=0.0) for arrival, _ in zip(arrivals, range(needed), strict=False))
    run = simulate(trace, cost, schedule, max_rows=max_rows, policy=policy, join_below=join_below)
    return run.requests_per_second


def best_join_below(
    arrivals: Sequence[Arrival], cost: CostModel, schedule: Schedule, *, max_rows: int, policy: Admission
) -> float:
    """The share of rows below which the next requests join that has the largest `capacity`; of equals the largest."""

    def finished(share: float) -> tuple[float, float]:
        return capacity(arrivals, cost, schedule, max_rows=max_rows, policy=policy, join_below=share), share

    return max(_SHARES, key=finished)


def _run(trace: Iterable[Arrival], fleet: Sequence[Worker]) -> tuple[float, float]:
    """Let everything happen in order; returns the times of the first arrival and of the last step's end."""
    began: float | None = None
    previous = -math.inf
    unfinished = [0] * len(fleet)
    under_way: list[tuple[float, int]] = []  # when the step of a worker ends, and which
    ended = 0.0

    def advance() -> None:
        """What the first step to end has finished leaves, and its worker goes on to the next."""
        nonlocal ended
        ended, index = heapq.heappop(under_way)
        unfinished[index] -= fleet[index].finished
        end = fleet[index].step(ended)
        if end is not None:
            heapq.heappush(under_way, (end, index))

    for number, arrival in enumerate(trace):
        now = arrival.seconds
        if (
            not (previous <= now < math.inf)
            or arrival.prompt_tokens < 1
            or not 1 <= arrival.new_tokens <= arrival.limit
        ):
            raise UsageError(
                f"request {number} of the trace is not accepted: arrivals may not go back in time, prompts have 1 "
                f"token or more, outputs 1 to their limit; this is {tuple(arrival)}"
            )
        previous = now
        began = now if began is None else began
        while under_way and under_way[0][0] < now:
            advance()
        chosen = unfinished.index(min(unfinished)) if len(fleet) > 1 else 0
        unfinished[chosen] += 1
        if fleet[chosen].submit(number, arrival):
            heapq.heappush(under_way, (now, chosen))  # wakes up once all that arrive now are here
    while under_way:
        advance()
    return began or 0.0, max(ended, began or 0.0)
