"""What is measured against each other, by name: an `Engine` for every one, and what its steps must read.

A step's time does not depend on what a cache holds, only on how much. So prompts are made up where an engine lets them
(`made_up`): computed, they would take most of a benchmark's time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from skipdecode.engine.base import Engine
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.performance.bench.workload import PEERS, QUANTIZED
from skipdecode.performance.cost import CostModel
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.machine import Machine
from skipdecode.schedule import Schedule

__all__ = ["Peer", "Rows", "make_peer", "replaced", "token_times"]


class Rows(NamedTuple):
    """Rows that start together: how many, and tokens of the prompt and new tokens of each."""

    batch: int
    prompt: int
    new: int


class Peer(ABC):
    """An engine under measurement, which runs a model's weights, greedy, without an end token.

    `weights` is the type in which it reads them, `arithmetic` the one in which it multiplies
    (`skipdecode.performance.machine.measure_products`). One that `skips` can run schedules; others are measured at
    full depth only. One that `times_prompts` has forwards of prompts that are its users'. One that `warms` compiles or
    records a step on its first run, which is not to be timed.
    """

    name: str
    skips: bool = False
    warms: bool = False
    times_prompts: bool = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights = self.arithmetic = str(model.dtype).removeprefix("torch.")
        self._warm: set[tuple[Schedule, Rows]] = set()
        self._geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)

    @abstractmethod
    def engine(self, schedule: Schedule, rows: Rows) -> Engine:
        """An engine with nothing to do, for such rows under a schedule."""

    @contextmanager
    def made_up(self, engine: Engine) -> Iterator[None]:
        """While this holds, the engine makes up what its cache holds of prompts, where it can."""
        yield

    def requests(self, rows: Rows) -> list[Request]:
        """What the rows ask for."""
        return [Request((5,) * rows.prompt, rows.new)] * rows.batch

    def run(self, schedule: Schedule, rows: Rows) -> list[float]:
        """Decode; returns the times of `token_times`."""
        if self.warms and (schedule, rows) not in self._warm:
            self._warm = {one for one in self._warm if one[1] == rows} | {(schedule, rows)}
            self.run(schedule, rows)
        engine = self.engine(schedule, rows)
        with self.made_up(engine):
            return token_times(engine, self.requests(rows))

    def step_seconds(self, schedule: Schedule, rows: Rows) -> list[float]:
        """Seconds of each decode step of all rows."""
        return [after - before for before, after in pairwise(self.run(schedule, rows))]

    def decode_seconds(self, schedule: Schedule, rows: Rows) -> float:
        """Seconds of the `new` - 1 steps behind the prompt, all of the batch's rows in each."""
        return sum(self.step_seconds(schedule, rows))

    def prompt_seconds(self, schedule: Schedule, batch: int, prompt: int) -> float:
        """Seconds of a forward over the rows' prompts, with the choice of the first token."""
        rows = Rows(batch, prompt, 1)
        engine = self.engine(schedule, rows)
        engine.decode(self.requests(rows))
        return engine.stats.seconds

    def reads(self, batch: int) -> CostModel:
        """What a step of `batch` rows must read, as a cost model whose seconds are bytes."""
        return CostModel.predicted(self._geometry, Machine(1.0), batch)

    def step_bytes(self, schedule: Schedule, rows: Rows) -> float:
        """Mean bytes that a step must read."""
        return self.reads(rows.batch).sequence_seconds(schedule, rows.prompt, rows.new) / (rows.new - 1)

    def step_flops(self, schedule: Schedule, rows: Rows) -> float:
        """Mean operations of a step: of products and of attention over the cache."""
        sizes, batch = self._geometry, rows.batch
        flops = batch * sizes.fixed_flops(), batch * sizes.layer_flops(), sizes.kv_flops_per_token()
        cost = CostModel.of_step(sizes.num_layers, batch, *flops)
        return cost.sequence_seconds(schedule, rows.prompt, rows.new) / (rows.new - 1)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give back what is not Python's to collect."""


def token_times(engine: Engine, requests: list[Request]) -> list[float]:
    """What `time.perf_counter` read when an engine had each token of requests of one length."""
    first, *_ = engine.submit(requests)
    times: list[float] = []
    while engine.has_work:
        times += [engine.began + out.seconds for out in engine.step() if out.request == first]
    return times


@contextmanager
def replaced(calls: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """While this holds, each (object, attribute) gives the call instead of what is there."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in calls]
    for owner, name, call in calls:
        setattr(owner, name, call)
    try:
        yield
    finally:
        for owner, name, held in before:
            if held is None:
                delattr(owner, name)  # the class's method shows again
            else:
                setattr(owner, name, held)


def make_peer(name: str, model: Any) -> Peer:
    """A peer by name.

    Raises
    ------
    UsageError
        For a name that is not known or does not cover the model.
    MissingExtraError
        If the peer's library is absent.
    """
    if name not in PEERS:
        raise UsageError(f"engine {name!r} is not known: accepted are {', '.join(PEERS)}")
    # Each engine's libraries are imported only when it is asked for.
    if name.startswith("llama.cpp-"):
        from skipdecode.performance.bench.peers.llama_cpp import LlamaCppPeer

        return LlamaCppPeer(model, name.removeprefix("llama.cpp-"))
    if name == "vllm":
        from skipdecode.performance.bench.peers.vllm import VllmPeer

        return VllmPeer(model)
    from skipdecode.performance.bench.peers import generate, own

    if name == "fast" or name in QUANTIZED:
        kind: Any = name.partition("-")[2] or None
        return own.FastPeer(model, quantization=kind)
    if name == "gated":
        return own.GatedPeer(model)
    return generate.TransformersPeer(model, name)
