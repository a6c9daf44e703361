"""The package's own engine as a peer."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from skipdecode.engine.depth import RowView
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.fast_model import FastModel, TokenRows
from skipdecode.engine.kernels.quantize import Quantization
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.open_model import open_model
from skipdecode.engine.requests import Request
from skipdecode.errors import UnfitModelError, UsageError
from skipdecode.performance.bench.peers import Peer
from skipdecode.performance.cost import CostModel, StepCost
from skipdecode.performance.machine import synchronize
from skipdecode.schedule import Schedule

__all__ = ["EnginePeer"]

_LINEARS = ("qkv", "out", "mlp_in", "mlp_out")


class _Shifted:
    """A budget policy whose schedule, of one drop order, may change between runs; position 0 is the prompt's last."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.now = Schedule.full(schedule.num_layers)

    def prompt_budget(self) -> int:
        return self.schedule.num_layers

    def first_budget(self) -> int:
        return self.schedule.num_layers

    def next_budget(self, row: RowView) -> int:
        return self.now.budget(row.position - 1) if row.position else self.schedule.num_layers


class EnginePeer(Peer):
    """The package's own engine.

    Parameters
    ----------
    fast : FastModel, optional
        Its fast path, where it is open already.
    quantization : {"int8", "int4"}, optional
        Type of the weights that the fast path is to read. Default: the model's own.

    Raises UsageError if the model has no fast path.
    """

    skips = True

    def __init__(self, model: Any, fast: FastModel | None = None, quantization: Quantization | None = None) -> None:
        super().__init__(model)
        self.name = "fast" if quantization is None else f"fast-{quantization}"
        self.weights = quantization or self.weights
        try:
            self.fast = open_model(model, quantization=quantization) if fast is None else fast
        except UnfitModelError as e:
            raise UsageError(
                f"the engine {self.name!r} does not cover this model: {e}; leave it out of --engines"
            ) from None
        self._policy = _Shifted(_bottom_up(self.fast.num_layers))
        self._recorded: set[Schedule] = set()

    def suited(self, schedule: Schedule) -> Schedule:
        """See `Peer`."""
        return self.fast.suited(schedule)

    def reads(self, batch: int) -> CostModel:
        """See `Peer`; of the weights as the engine holds them."""
        spec, geometry = self.fast._spec, self._geometry
        layers = sum(_bytes(getattr(layer, name)) for layer in spec.layers for name in _LINEARS)
        rows = batch * spec.embedding.shape[1] * spec.embedding.element_size()
        step = StepCost(batch, _bytes(spec.head) + rows, layers / geometry.num_layers, geometry.kv_bytes_per_token())
        return replace(super().reads(batch), steps=(step,))

    def prepare(self, batch: int, prompt: int, new: int) -> None:
        self.__dict__.pop("_engine", None)  # the one before, with its memory, which the new one may take over
        self._recorded.clear()
        self._policy.now = Schedule.full(self.fast.num_layers)
        # All prompts in one forward: rows that begin together stay together.
        engine = FastEngine(self.fast, self._policy, max_rows=batch, prompt_tokens=batch * prompt)
        engine.submit([Request((0,) * (prompt - 1), new + 1)] * batch)
        # The step that ends the prompts also feeds every row's first new token: the prompt's last, as counted here.
        with _not_computing(self.fast):
            while engine.stats.steps == 0:
                engine.step()
        with torch.inference_mode():
            engine.kv.fill()
        self._engine = engine

    def start(self, schedule: Schedule) -> FastEngine:
        """An engine that stands behind the prompt, with `new` - 1 steps to go under `schedule`."""
        self._policy.now = schedule
        with torch.inference_mode():
            return copy.deepcopy(self._engine, {id(o): o for o in (self.fast, self._policy)})

    def step_seconds(self, schedule: Schedule) -> list[float]:
        """Seconds of each step; see `decode_seconds`."""
        if self.fast.captures_graphs and schedule not in self._recorded:
            # A step's first run is recorded, which is not to be timed.
            self._recorded.add(schedule)
            self.step_seconds(schedule)
        engine = self.start(schedule)
        synchronize(self.fast.device)
        times = [time.perf_counter()]
        while engine.has_work:
            engine.step()
            times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def decode_seconds(self, schedule: Schedule) -> float:
        return sum(self.step_seconds(schedule))

    def prompt_seconds(self, batch: int, prompt: int) -> float:
        """Seconds of a full-depth forward over the rows' prompts, with the choice of the first token."""
        full = Schedule.full(self.fast.num_layers)
        engine = FastEngine(self.fast, full, max_rows=batch, prompt_tokens=batch * prompt)
        engine.submit([Request((0,) * prompt, 1)] * batch)
        synchronize(self.fast.device)
        start = time.perf_counter()
        engine.step()
        return time.perf_counter() - start


def _bytes(spec: LinearSpec) -> int:
    vectors = (spec.bias, spec.gamma, spec.beta)
    return spec.weight.nbytes + sum(t.nbytes for t in vectors if t is not None)


def _bottom_up(layers: int) -> Schedule:
    """The paper's drop order, down to a single layer: the first is the last to go."""
    order = (*range(1, layers - 1), 0)[: layers - 1]
    return Schedule.constant(layers, 1, warmup_layers=0, drop_order=order)


@contextmanager
def _not_computing(model: FastModel) -> Iterator[None]:
    """While this holds, forwards of the model answer zeros at once."""

    def zeros(rows: TokenRows, kv: object) -> torch.Tensor:
        return torch.zeros(len(rows.wanted), model.vocab_size)

    model.forward = zeros  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward  # the class's method shows again
