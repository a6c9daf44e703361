"""One modelled engine of the simulator, its loop over sizes instead of tensors, and what comes out. No torch."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np

from skipdecode.engine.requests import Request
from skipdecode.engine.scheduler import Scheduler
from skipdecode.engine.sequence import Sequence as EngineSequence
from skipdecode.performance.cost import CostModel
from skipdecode.performance.parts import tokens_read
from skipdecode.performance.simulate.traces import Arrival
from skipdecode.schedule import Schedule

__all__ = ["Simulation", "Worker", "spread"]


@dataclass
class Simulation:
    """What came out, over all workers.

    Parameters
    ----------
    workers, max_rows : int
        Modelled engines, and most rows of each.
    seconds : float
        From the first arrival to the end of the last request.
    finished, new_tokens, prompt_tokens, steps : int
        Requests finished, tokens put out, tokens of prompts run, decode steps.
    row_steps, token_layers, layer_reads : int
        Tokens fed back; layers run on them; layers that decode steps ran for any of them.
    prompt_seconds, decode_seconds : float
        Busy time of each kind; of a forward of both, shared out by tokens x layers.
    row_seconds : float
        Sum over requests of the time that they held a row.
    first_token, between_tokens, whole : array of float
        Seconds from arrival to the first token, between tokens of a request, from arrival to the last token.
    """

    workers: int
    max_rows: int
    seconds: float = 0.0
    finished: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    token_layers: int = 0
    layer_reads: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    row_seconds: float = 0.0
    first_token: array[float] = field(default_factory=lambda: array("d"))
    between_tokens: array[float] = field(default_factory=lambda: array("d"))
    whole: array[float] = field(default_factory=lambda: array("d"))

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, of all workers together."""
        return self.new_tokens / self.seconds if self.seconds else math.inf

    @property
    def requests_per_second(self) -> float:
        """Requests finished a second."""
        return self.finished / self.seconds if self.seconds else math.inf

    @property
    def layers_per_step(self) -> float:
        """Layers that a decode step runs for any of its rows, on average."""
        return self.layer_reads / max(1, self.steps)

    @property
    def layers_per_token(self) -> float:
        """Layers that a fed back token runs, on average."""
        return self.token_layers / max(1, self.row_steps)

    @property
    def rows_per_step(self) -> float:
        """Rows of a decode step, on average."""
        return self.row_steps / max(1, self.steps)

    @property
    def busy(self) -> float:
        """Share of the time that a worker runs anything. Not a load: one row keeps a worker as busy as all rows do."""
        busy = self.prompt_seconds + self.decode_seconds
        return busy / (self.workers * self.seconds) if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the workers' rows that hold a request, over the whole time."""
        return self.row_seconds / (self.workers * self.max_rows * self.seconds) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; latencies in seconds, as `spread` gives them."""
        return {
            "workers": self.workers,
            "max_rows": self.max_rows,
            "requests": self.finished,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_second,
            "requests_per_s": self.requests_per_second,
            "layers_per_step": self.layers_per_step,
            "layers_per_token": self.layers_per_token,
            "rows_per_step": self.rows_per_step,
            "busy": self.busy,
            "occupancy": self.occupancy,
            "prompt_seconds": self.prompt_seconds,
            "decode_seconds": self.decode_seconds,
            "first_token_s": spread(self.first_token),
            "inter_token_s": spread(self.between_tokens),
            "request_s": spread(self.whole),
        }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, 90th and 99th percentile, largest value; 0 without values.

    A percentile is the least value that at least this share of the values does not exceed.
    """
    found = np.asarray(values if len(values) else [0.0])
    percentiles = {f"p{p}": float(np.percentile(found, p, method="inverted_cdf")) for p in (50, 90, 99)}
    return {"mean": float(found.mean())} | percentiles | {"max": float(found.max())}


@dataclass(eq=False, slots=True)
class _Row:
    """An admitted request."""

    number: int
    arrival: Arrival
    admitted: float
    budget: int
    left: int  # prompt tokens that have not run
    output: int = 0  # tokens put out
    last: float = 0.0  # when the latest was


class Worker:
    """A modelled engine, with a scheduler of its own; it adds up in `result`, which may be shared.

    Attributes
    ----------
    finished : int
        Requests that the latest step finished.
    """

    def __init__(
        self, cost: CostModel, schedule: Schedule, scheduler: Scheduler, result: Simulation, prompt_chunk: int
    ) -> None:
        self._cost, self._schedule, self._scheduler, self._result = cost, schedule, scheduler, result
        self._chunk = prompt_chunk
        self._steps = [cost.at(rows) for rows in range(1, scheduler.max_rows + 1)]
        self._new: list[EngineSequence] = []
        self._arrivals: dict[int, Arrival] = {}
        self._starting: list[_Row] = []
        self._running: list[_Row] = []
        self._idle = True
        self.finished = 0

    def submit(self, number: int, arrival: Arrival) -> bool:
        """Take a request; returns whether the worker must be woken for it."""
        self._arrivals[number] = arrival
        request = Request((0,) * arrival.prompt_tokens, arrival.limit)
        self._new.append(EngineSequence(number, request, self._schedule))
        idle, self._idle = self._idle, False
        return idle

    def step(self, now: float) -> float | None:
        """As `FastEngine.step` on a CPU: admit, then one forward; returns when it ends, None with nothing to do.

        Prompts with layers of their own have a forward to themselves; rows step after it only if it put out nothing.
        """
        self.finished = 0
        self._scheduler.submit(self._new)
        self._new = []
        for sequence in self._scheduler.admit(len(self._starting) + len(self._running)):
            arrival = self._arrivals.pop(sequence.number)
            budget = len(self._schedule.last_prompt_layers())
            self._starting.append(_Row(sequence.number, arrival, now, budget, arrival.prompt_tokens))
        if not self._starting and not self._running:
            self._idle = True
            return None
        tokens = self._take_prompts()
        done = [row for row in self._starting if not row.left]
        rows = self._running
        if tokens and not isinstance(self._schedule.prompt, str):
            now += self._own_prompts(tokens, len(done))
            tokens, rows = 0, [] if done else rows
        for row in rows:
            row.budget = self._schedule.budget(row.output - 1)
        rows = sorted(rows, key=attrgetter("budget"), reverse=True)
        if rows or tokens:
            now += self._forward(rows, tokens, len(done))
        self._running += done
        self._starting = [row for row in self._starting if row.left]
        for row in (*rows, *done):
            self._put_out(row, now)
        return now

    def _take_prompts(self) -> int:
        """Take from the prompts that are due what a forward has room for; returns how many tokens."""
        room = self._chunk
        for row in self._starting:
            part = min(row.left, room)
            row.left -= part
            room -= part
            if not room:
                break
        return self._chunk - room

    def _own_prompts(self, tokens: int, ends: int) -> float:
        """Seconds of a forward over tokens of prompts alone, of which so many end."""
        seconds = self._cost.prompt_seconds(self._schedule, tokens, min(ends, len(self._steps)))
        self._result.prompt_tokens += tokens
        self._result.prompt_seconds += seconds
        return seconds

    def _forward(self, rows: list[_Row], tokens: int, ends: int) -> float:
        """Seconds of a forward over a token of each row, by falling depth, and tokens of prompts, of which some end."""
        result, cost = self._result, self._cost
        budgets = [row.budget for row in rows]
        prompt_depth = len(self._schedule.prompt_layers()) if tokens else 0
        seconds = self._steps[max(len(rows) + ends, 1) - 1].fixed_seconds
        read = 0.0
        # The layers between two depths run on exactly the rows that are at least that deep, and on the prompts.
        for count, (depth, below) in enumerate(pairwise([max([prompt_depth, *budgets[:1]]), *budgets, 0])):
            if count:
                row = rows[count - 1]
                read += tokens_read(row.arrival.prompt_tokens + row.output, cost.window, cost.window_share)
            if layers := depth - below:
                step = self._steps[max(count, 1) - 1]
                layer = cost.prompt_layer_seconds(tokens + count)[0] if tokens else step.layer_seconds
                seconds += layers * (layer + step.kv_seconds * read)
        prompt_layers, layers = tokens * prompt_depth, sum(budgets)
        result.prompt_tokens += tokens
        result.prompt_seconds += seconds * prompt_layers / (layers + prompt_layers)
        result.decode_seconds += seconds * layers / (layers + prompt_layers)
        if rows:
            result.steps += 1
            result.row_steps += len(rows)
            result.token_layers += layers
            result.layer_reads += budgets[0]
        return seconds

    def _put_out(self, row: _Row, now: float) -> None:
        """A token of a row."""
        result, arrival = self._result, row.arrival
        result.new_tokens += 1
        if row.output:
            result.between_tokens.append(now - row.last)
        else:
            result.first_token.append(now - arrival.seconds)
        row.output += 1
        row.last = now
        if row.output == arrival.new_tokens:
            self._running.remove(row)
            self.finished += 1
            result.finished += 1
            result.row_seconds += now - row.admitted
            result.whole.append(now - arrival.seconds)
