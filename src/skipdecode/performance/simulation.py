"""A simulation of the decode engine: its own scheduler and loop, with a cost model as the forward and a virtual clock.

A cost for every number of rows, a schedule and a request trace go in; throughput, latency percentiles and layers per
step come out. `DecodeLoop` decides what each forward runs, here as in `FastEngine`. No torch.

Not modelled: time in Python and in sampling beyond the cost's fixed part, the limit on KV memory, a prefix cache, the
static batches of the engine on transformers, attention inside a prompt, noise. A result is only as good as its cost
model: compare it with a real run before relying on it.
"""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from skipdecode.engine.base import EngineStats, NextToken
from skipdecode.engine.batch import Chunk
from skipdecode.engine.loop import DecodeLoop
from skipdecode.engine.requests import Request
from skipdecode.engine.scheduler import PROMPT_TOKENS
from skipdecode.engine.sequence import Sequence as EngineSequence
from skipdecode.errors import UsageError
from skipdecode.performance.cost import CostModel, StepCost, tokens_read
from skipdecode.performance.traces import Arrival
from skipdecode.schedule import Schedule

__all__ = ["POLICIES", "Admission", "Simulation", "best_refill_below", "capacity", "rows_by_layer"]
__all__ += ["simulate", "spread"]

Admission = Literal["static", "continuous", "refill"]
POLICIES: dict[Admission, tuple[float, bool]] = {
    "static": (0.0, False),
    "continuous": (1.0, True),
    "refill": (0.25, True),
}
"""By name: `refill_below` and `in_order` of `Scheduler`. Refill: requests join at a quarter of the slots."""

_SATURATING = 64  # requests a row with which `capacity` is found
_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # of the slots, tried by `best_refill_below`; 1 is continuous batching


_END = NextToken(1)  # the last token of each output
_FIRST_TOKEN = 2  # each token differs from all others, so that no text repeats itself


class _NoSampler:
    """Stands for the sampler of a sequence without logits."""

    def fork(self) -> Self:
        """A copy."""
        return self


class _Work(NamedTuple):
    """What a forward does in a layer.

    `rows` of sequences and `tokens` of prompts run the layer, `projected` tokens are projected; the rows read `read`
    cached tokens. `bridged` rows and `bridged_tokens` take its bridge. A last prompt token counts as a row in the
    layers in which the others are projected.
    """

    rows: int
    tokens: int
    projected: int
    read: float
    bridged: int
    bridged_tokens: int


@dataclass
class Simulation:
    """What came out, over all workers.

    Parameters
    ----------
    workers, max_rows : int
        Modelled engines, and most sequences of each.
    stats : EngineStats
        Of all engines together; times are on the virtual clock.
    seconds : float
        From the first arrival to the end of the last request.
    finished : int
        Requests finished.
    row_seconds : float
        Sum over requests of the time that they were in the batch.
    first_token, between_tokens, whole : array of float
        Seconds from arrival to the first token, between tokens of a request, from arrival to the last token.
    """

    workers: int
    max_rows: int
    stats: EngineStats = field(default_factory=EngineStats)
    seconds: float = 0.0
    finished: int = 0
    row_seconds: float = 0.0
    first_token: array[float] = field(default_factory=lambda: array("d"))
    between_tokens: array[float] = field(default_factory=lambda: array("d"))
    whole: array[float] = field(default_factory=lambda: array("d"))

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second, of all workers together."""
        return self.stats.new_tokens / self.seconds if self.seconds else math.inf

    @property
    def requests_per_second(self) -> float:
        """Requests finished a second."""
        return self.finished / self.seconds if self.seconds else math.inf

    @property
    def layers_per_step(self) -> float:
        """Layers that a decode step runs for any of its sequences, on average."""
        return self.stats.layer_reads / max(1, self.stats.steps)

    @property
    def layers_per_token(self) -> float:
        """Layers that a fed back token runs, on average."""
        return self.stats.mean_layers or 0.0

    @property
    def rows_per_step(self) -> float:
        """Sequences of a decode step, on average."""
        return self.stats.fed_tokens / max(1, self.stats.steps)

    @property
    def busy(self) -> float:
        """Share of the time that a worker runs anything. Not a load: one sequence keeps a worker as busy as many do."""
        return self.stats.seconds / (self.workers * self.seconds) if self.seconds else 0.0

    @property
    def occupancy(self) -> float:
        """Share of the workers' places in the batch that hold a request, over the whole time."""
        return self.row_seconds / (self.workers * self.max_rows * self.seconds) if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary; latencies in seconds, as `spread` gives them."""
        return {
            "workers": self.workers,
            "max_rows": self.max_rows,
            "requests": self.finished,
            "prompt_tokens": self.stats.prompt_tokens,
            "new_tokens": self.stats.new_tokens,
            "drafted_tokens": self.stats.drafted_tokens,
            "accepted_tokens": self.stats.accepted_tokens,
            "steps": self.stats.steps,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_second,
            "requests_per_s": self.requests_per_second,
            "layers_per_step": self.layers_per_step,
            "layers_per_token": self.layers_per_token,
            "rows_per_step": self.rows_per_step,
            "busy": self.busy,
            "occupancy": self.occupancy,
            "prompt_seconds": self.stats.prompt_seconds,
            "decode_seconds": self.stats.after_prompts,
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


class _SimulatedEngine(DecodeLoop):
    """The engine's loop with forwards that only take time, on a clock of its own.

    Attributes
    ----------
    now : float
        What the clock reads, in seconds.
    new : list of Arrival
        Requests that have come since the latest step.
    unfinished : int
        Requests that have come and had not ended when the latest step began.
    """

    name = "simulated"
    kv_bytes = 0
    now = 0.0

    def __init__(
        self, cost: CostModel, schedule: Schedule, result: Simulation, acceptance: float | None, **options: Any
    ) -> None:
        super().__init__(schedule, max_rows=result.max_rows, **options)
        self._acceptance = acceptance
        self._tokens, self._random = count(_FIRST_TOKEN), random.Random(0)
        self.stats = result.stats
        self.new: list[Arrival] = []
        self.unfinished = self._ended = 0
        self._cost, self._result = cost, result
        self._steps = [cost.at(rows) for rows in range(1, result.max_rows + 1)]
        self._asked: dict[int, tuple[Arrival, float]] = {}  # by number; the time of the latest token

    def clock(self) -> float:
        return self.now

    def advance(self, now: float) -> bool:
        """One step from `now` on, unless there is nothing to do."""
        self.now, result = now, self._result
        self.unfinished -= self._ended
        self._ended = 0
        if self.new:
            ends, exact = frozenset((_END.token,)), self._acceptance is not None
            requests = [Request((0,) * a.prompt_tokens, a.limit, stop_ids=ends, exact=exact) for a in self.new]
            self._asked |= {n: (a, a.seconds) for n, a in zip(self.submit(requests), self.new, strict=True)}
            self.new.clear()
        if not self.has_work:
            return False
        outputs = self.step()
        ended = 0
        for out in outputs:
            arrival, before = self._asked[out.request]
            (result.between_tokens if out.position else result.first_token).append(self.now - before)
            self._asked[out.request] = arrival, self.now
            if out.finish_reason is not None:
                del self._asked[out.request]
                result.whole.append(self.now - arrival.seconds)
                ended += 1
        result.finished += ended
        result.row_seconds += (self.rows + ended) * (self.now - now)
        self._ended = ended
        return True

    def _run(self, chunks: list[Chunk], *, drafting: bool = False) -> tuple[list[EngineSequence], Any]:
        due = [chunk for chunk in chunks if chunk.end >= len(chunk.sequence.request.prompt)]
        self.now += self._seconds(chunks, len(due))
        # A row of a check has the draft that it judges.
        judged = [
            (chunk.sequence, place, draft)
            for chunk in due
            for place, draft in enumerate([*(chunk.tokens[1:] if chunk.sequence.output else ()), None])
        ]
        return [chunk.sequence for chunk in due], judged

    def _join(self, sequence: EngineSequence) -> None:
        sequence.sampler = _NoSampler()  # type: ignore[assignment]  # no logits, nothing to sample from

    def _choose(self, predicted: Any, row: int, sampler: Any) -> NextToken:
        sequence, place, draft = predicted[row]
        if len(sequence.output) + place + 1 == self._asked[sequence.number][0].new_tokens:
            return _END
        if draft is not None and self._random.random() < (self._acceptance or 0.0):
            return NextToken(draft)
        return NextToken(next(self._tokens))

    def _seconds(self, chunks: list[Chunk], due: int) -> float:
        """Of a forward; `due` sequences get tokens with it."""
        cost = self._cost
        decoding = [(chunk, len(chunk.tokens)) for chunk in chunks if chunk.sequence.output]
        prompts = [(chunk.sequence.prompt, len(chunk.tokens)) for chunk in chunks if not chunk.sequence.output]
        last = [(c, 1) for c in chunks if c.sequence.prompt.own and c.start < len(c.sequence.request.prompt) == c.end]
        pairs: list[list[tuple[tuple[int, ...], float]]] = [
            [*((chunk.layers, rows) for chunk, rows in decoding), *((c.sequence.prompt.projected, 1) for c, _ in last)],
            [(prompt.run, tokens) for prompt, tokens in prompts],
            [(prompt.projected, tokens) for prompt, tokens in prompts],
            [(chunk.layers, self._read(chunk)) for chunk, _ in decoding],
            [(self._bridged(chunk.layers), rows) for chunk, rows in decoding + last],
            [(self._bridged(prompt.run), tokens) for prompt, tokens in prompts if not prompt.own],
        ]
        seconds = self._step(max(due, 1)).fixed_seconds
        alike = Counter(zip(*(rows_by_layer(cost.num_layers, each) for each in pairs), strict=True))
        for work, layers in ((_Work._make(numbers), layers) for numbers, layers in alike.items()):
            layer = self._layer(work.rows, work.tokens) + self._step(max(work.rows, 1)).kv_seconds * work.read
            if work.projected:
                layer += (1 + cost.taps) * cost.prompt_layer_seconds(work.projected)[1]
            seconds += layers * (layer + cost.bridge_share * self._layer(work.bridged, work.bridged_tokens))
        return seconds

    def _layer(self, rows: int, prompt_tokens: int) -> float:
        """Of a layer on so many rows of sequences and tokens of prompts, without the cache read."""
        if prompt_tokens or rows > len(self._steps):
            return self._cost.prompt_layer_seconds(prompt_tokens + rows)[0]
        return self._steps[rows - 1].layer_seconds if rows else 0.0

    def _read(self, chunk: Chunk) -> float:
        """Cached tokens that the tokens of a chunk read in a layer."""
        cost = self._cost
        return sum(tokens_read(at + 1, cost.window, cost.window_share) for at in range(chunk.start, chunk.end))

    def _bridged(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """The layers whose bridges tokens take that run these layers."""
        return tuple(sorted({*range(self.num_layers)} - {*layers})) if self._cost.bridge_share else ()

    def _step(self, rows: int) -> StepCost:
        """The cost of a step of so many rows, at most the largest that is known."""
        return self._steps[min(rows, len(self._steps)) - 1]


def simulate(
    trace: Iterable[Arrival],
    cost: CostModel,
    schedule: Schedule,
    *,
    max_rows: int = 8,
    policy: Admission = "continuous",
    refill_below: float | None = None,
    workers: int = 1,
    prompt_chunk: int = PROMPT_TOKENS,
    acceptance: float | None = None,
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
    policy : {"static", "continuous", "refill"}
        Who joins when.
    refill_below : float, optional
        In place of the policy's own.
    prompt_chunk : int
        Most prompt tokens of one forward; the engine's is the default.
    acceptance : float, optional
        Simulates exact decoding: the schedule drafts tokens, and full depth accepts each with this chance.

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
    if policy not in POLICIES:
        raise UsageError(f"policy={policy!r} is not accepted: give one of {', '.join(POLICIES)}")
    own, in_order = POLICIES[policy]
    result = Simulation(workers, max_rows)
    refill_below = own if refill_below is None else refill_below
    options = {"refill_below": refill_below, "in_order": in_order, "prompt_tokens": prompt_chunk}
    began, ended = _run(
        trace, [_SimulatedEngine(cost, schedule, result, acceptance, **options) for _ in range(workers)]
    )
    result.seconds = ended - began
    return result


def capacity(
    arrivals: Iterable[Arrival],
    cost: CostModel,
    schedule: Schedule,
    *,
    max_rows: int = 8,
    policy: Admission = "continuous",
    refill_below: float | None = None,
    acceptance: float | None = None,
) -> float:
    """Requests a second that one worker finishes when it never waits for any.

    `arrivals` gives the lengths (its times do not count); some tens of requests for every row are read.
    """
    needed = _SATURATING * max_rows
    trace = (arrival._replace(seconds=0.0) for arrival, _ in zip(arrivals, range(needed), strict=False))
    options: dict[str, Any] = {"max_rows": max_rows, "policy": policy, "refill_below": refill_below}
    return simulate(trace, cost, schedule, acceptance=acceptance, **options).requests_per_second


def best_refill_below(arrivals: Sequence[Arrival], cost: CostModel, schedule: Schedule, **options: Any) -> float:
    """The share of rows below which the next requests join that has the largest `capacity`; of equals the largest.

    `options` are those of `capacity`.
    """
    return max(_SHARES, key=lambda share: (capacity(arrivals, cost, schedule, refill_below=share, **options), share))


def _run(trace: Iterable[Arrival], fleet: Sequence[_SimulatedEngine]) -> tuple[float, float]:
    """Let everything happen in order; returns the times of the first arrival and of the last step's end."""
    began: float | None = None
    previous = -math.inf
    under_way: list[tuple[float, int]] = []  # when the step of a worker ends, and which
    ended = 0.0

    def advance() -> None:
        """The worker whose step ends first goes on to its next."""
        nonlocal ended
        ended, index = heapq.heappop(under_way)
        if fleet[index].advance(ended):
            heapq.heappush(under_way, (fleet[index].now, index))

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
        chosen = min(range(len(fleet)), key=lambda index: fleet[index].unfinished) if len(fleet) > 1 else 0
        if not fleet[chosen].unfinished:
            heapq.heappush(under_way, (now, chosen))  # wakes up once all that arrive now are here
        fleet[chosen].unfinished += 1
        fleet[chosen].new.append(arrival)
    while under_way:
        advance()
    return began or 0.0, max(ended, began or 0.0)


def rows_by_layer(num_layers: int, spans: Iterable[tuple[tuple[int, ...], float]]) -> list[float]:
    """For each layer the number of rows that have it; `spans` are pairs of layers and a number of rows."""
    numbers: dict[tuple[int, ...], float] = {}
    for layers, rows in spans:
        numbers[layers] = numbers.get(layers, 0) + rows
    counts: list[float] = [0] * num_layers
    for layers, rows in numbers.items():
        for layer in layers:
            counts[layer] += rows
    return counts
