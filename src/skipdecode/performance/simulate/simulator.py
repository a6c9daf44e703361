"""A discrete-event simulation of the decode engine's scheduling: no model, no torch, no tensors.

A cost for every number of rows, a schedule (or a budget policy) and a request trace go in; throughput, latency
percentiles and layers per step come out. Admission is the engine's own `Scheduler`, so what is simulated is what runs;
`sim_worker` mirrors the engine's loop. Memory grows with the requests in flight only.

Not modelled: time in Python and in sampling beyond the cost's fixed part, the limit on KV memory, attention inside a
prompt, noise. A result is only as good as its cost model: compare it with a real run before relying on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skipdecode.engine.depth import BudgetPolicy
from skipdecode.engine.scheduler import Scheduler
from skipdecode.errors import UsageError
from skipdecode.performance.batch_cost import StepCost
from skipdecode.performance.simulate.totals import Totals
from skipdecode.performance.simulate.traces import Arrival
from skipdecode.performance.simulate.worker import Worker
from skipdecode.schedule import Schedule

__all__ = ["POLICIES", "Admission", "Simulation", "best_join_below", "capacity", "new_scheduler", "simulate"]

Admission = Literal["waves", "continuous", "cohort"]
POLICIES: dict[Admission, tuple[float, bool]] = {
    "waves": (0.0, False),
    "continuous": (1.0, True),
    "cohort": (0.25, True),
}
"""By name: `join_below` and `in_order` of `Scheduler`. A cohort joins when a quarter of the rows is left."""

_SATURATING = 64  # requests a row with which `capacity` is found
_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the rows, tried by `best_join_below`; the last is continuous batching


@dataclass(frozen=True)
class Simulation:
    """What came out.

    Parameters
    ----------
    workers, max_rows : int
        Modelled engines, and most rows of each.
    seconds : float
        From the first arrival to the end of the last request.
    totals : Totals
        Over all workers.
    """

    workers: int
    max_rows: int
    seconds: float
    totals: Totals

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, of all workers together."""
        return self.totals.new_tokens / self.seconds if self.seconds else math.inf

    @property
    def requests_per_second(self) -> float:
        """Requests finished a second."""
        return self.totals.finished / self.seconds if self.seconds else math.inf

    @property
    def layers_per_step(self) -> float:
        """Layers that a decode step runs for any of its rows, on average."""
        return self.totals.layer_reads / max(1, self.totals.steps)

    @property
    def layers_per_token(self) -> float:
        """Layers that a fed back token runs, on average."""
        return self.totals.token_layers / max(1, self.totals.row_steps)

    @property
    def rows_per_step(self) -> float:
        """Rows of a decode step, on average."""
        return self.totals.row_steps / max(1, self.totals.steps)

    @property
    def busy(self) -> float:
        """Share of the time that a worker runs anything. Not a load: one row keeps a worker as busy as all rows do."""
        busy = self.totals.prompt_seconds + self.totals.decode_seconds
        return busy / (self.workers * self.seconds) if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the workers' rows that hold a request, over the whole time."""
        return self.totals.row_seconds / (self.workers * self.max_rows * self.seconds) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; latencies in seconds."""
        totals = self.totals
        return {
            "workers": self.workers,
            "max_rows": self.max_rows,
            "requests": totals.finished,
            "prompt_tokens": totals.prompt_tokens,
            "new_tokens": totals.new_tokens,
            "steps": totals.steps,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_second,
            "requests_per_s": self.requests_per_second,
            "layers_per_step": self.layers_per_step,
            "layers_per_token": self.layers_per_token,
            "rows_per_step": self.rows_per_step,
            "busy": self.busy,
            "occupancy": self.occupancy,
            "prompt_seconds": totals.prompt_seconds,
            "decode_seconds": totals.decode_seconds,
            "first_token_s": totals.first_token.to_dict(),
            "inter_token_s": totals.between_tokens.to_dict(),
            "request_s": totals.whole.to_dict(),
        }


def new_scheduler(policy: Admission, max_rows: int, join_below: float | None = None) -> Scheduler:
    """The engine's scheduler with the settings of a policy's name; `join_below` in place of the policy's own."""
    if policy not in POLICIES:
        raise UsageError(f"policy={policy!r} is not accepted: give one of {', '.join(POLICIES)}")
    own, in_order = POLICIES[policy]
    return Scheduler(max_rows, own if join_below is None else join_below, in_order=in_order)


def simulate(
    trace: Iterable[Arrival],
    cost: StepCost,
    budgets: Schedule | BudgetPolicy,
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
        In order of arrival. Read as it goes; may have millions.
    cost : StepCost
        Seconds of steps and prompts; `BatchCost` is one.
    budgets : Schedule or BudgetPolicy
        Layers of each row and position. A policy sees a log probability of 0, and costs an event for every step.
    max_rows : int
        Most rows of a worker.
    policy : {"waves", "continuous", "cohort"}
        Who joins when; see `POLICIES`.
    join_below : float, optional
        In place of the policy's own.
    workers : int
        Modelled engines.
    prompt_chunk : int
        Most prompt tokens of one forward; the engine's is the default.

    Raises
    ------
    UsageError
        If a value is out of range, or the trace is not in order.
    ScheduleError
        If schedule and cost are for different numbers of layers, or a policy raises a budget.
    """
    schedule = budgets if isinstance(budgets, Schedule) else budgets.schedule
    schedule.check_fits(cost.num_layers)
    for name, value in (("workers", workers), ("prompt_chunk", prompt_chunk)):
        if value < 1:
            raise UsageError(f"{name}={value} is not accepted: give 1 or more")
    if max_rows > cost.max_rows:
        raise UsageError(f"max_rows={max_rows} is not accepted: the cost is known for up to {cost.max_rows} rows")
    totals = Totals()
    fleet = [
        Worker(cost, budgets, new_scheduler(policy, max_rows, join_below), totals, prompt_chunk) for _ in range(workers)
    ]
    began = _run(trace, fleet)
    return Simulation(workers, max_rows, max(0.0, totals.last_end - began), totals)


def capacity(
    arrivals: Iterable[Arrival],
    cost: StepCost,
    budgets: Schedule | BudgetPolicy,
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
    run = simulate(trace, cost, budgets, max_rows=max_rows, policy=policy, join_below=join_below)
    return run.requests_per_second


def best_join_below(
    arrivals: Sequence[Arrival], cost: StepCost, schedule: Schedule, *, max_rows: int = 8, policy: Admission = "cohort"
) -> float:
    """The share of rows below which the next requests join that has the largest `capacity`; of equals the largest."""

    def finished(share: float) -> tuple[float, float]:
        return capacity(arrivals, cost, schedule, max_rows=max_rows, policy=policy, join_below=share), share

    return max(_SHARES, key=finished)


def _run(trace: Iterable[Arrival], fleet: list[Worker]) -> float:
    """Let everything happen in order; returns the time of the first arrival."""
    began: float | None = None
    previous = -math.inf
    loads = [0] * len(fleet)
    events: list[tuple[float, int]] = []
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
        while events and events[0][0] < now:
            _advance(events, fleet, loads)
        chosen = loads.index(min(loads)) if len(fleet) > 1 else 0
        loads[chosen] += 1
        worker = fleet[chosen]
        if worker.submit(number, arrival) and worker.end is not None:
            heapq.heappush(events, (worker.end, chosen))
    while events:
        _advance(events, fleet, loads)
    return began or 0.0


def _advance(events: list[tuple[float, int]], fleet: list[Worker], loads: list[int]) -> None:
    time, index = heapq.heappop(events)
    worker = fleet[index]
    if worker.end != time:
        return  # cut short since; another event stands for it
    loads[index] -= worker.advance()
    if worker.end is not None:
        heapq.heappush(events, (worker.end, index))
