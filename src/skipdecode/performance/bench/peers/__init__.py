"""What is measured against each other: one small class an engine, by name. Sizes in, seconds and bytes read out.

A step's time does not depend on what a cache holds, only on how much. So a timed run computes no prompt, and the
caches behind it are filled with made-up keys and values; only drafting methods, whose speed depends on the text, get a
real one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from skipdecode.errors import UsageError
from skipdecode.performance.bench.workload import DRAFTING, PEERS, QUANTIZED
from skipdecode.performance.cost import CostModel
from skipdecode.performance.geometry import ModelGeometry
from skipdecode.performance.machine import Machine
from skipdecode.schedule import Schedule

__all__ = ["Peer", "make_peer"]


class Peer(ABC):
    """An engine under measurement, which runs a model's weights, greedy, without an end token.

    Attributes
    ----------
    name : str
        Of its rows.
    weights : str
        Type in which it reads the weights.
    skips : bool
        Whether it can run schedules; if not, it is measured at full depth only.
    max_batch : int or None
        Most rows that it decodes together; None for any number.
    """

    name: str
    skips: bool = False
    max_batch: int | None = None

    def __init__(self, model: Any) -> None:
        self.weights = str(model.dtype).removeprefix("torch.")
        self._geometry = ModelGeometry.from_config(model.config, model.dtype.itemsize)

    def suited(self, schedule: Schedule) -> Schedule:
        """The schedule that it runs where it is asked for `schedule`."""
        return schedule

    @abstractmethod
    def prepare(self, batch: int, prompt: int, new: int) -> None:
        """Make ready for runs of these sizes; not timed."""

    @abstractmethod
    def decode_seconds(self, schedule: Schedule) -> float:
        """Seconds of the `new` - 1 steps behind the prompt, all of the batch's rows in each."""

    def reads(self, batch: int) -> CostModel:
        """What a step of `batch` rows must read, as a cost model whose seconds are bytes."""
        return CostModel.predicted(self._geometry, Machine(1.0), batch)

    def step_bytes(self, schedule: Schedule, batch: int, prompt: int, new: int) -> float:
        """Mean bytes that a step must read in the run that `prepare` and `decode_seconds` describe."""
        return self.reads(batch).sequence_seconds(schedule, prompt, new) / (new - 1)

    def mean_layers(self, schedule: Schedule, steps: int) -> float:
        """Mean layers that a step runs."""
        return schedule.mean_budget(steps)

    def close(self) -> None:  # noqa: B027  # most have nothing to give back
        """Give back what is not Python's to collect."""


def make_peer(name: str, model: Any, *, text: list[int] | None = None, exit_layer: int | None = None) -> Peer:
    """A peer by name.

    Drafting peers continue `text`, the tokens of a real one; `exit_layer` layers draft in "early-exit", by default a
    quarter of them.

    Raises
    ------
    UsageError
        For a name that is not known or does not cover the model, and for a drafting peer without a text.
    MissingExtraError
        If the peer's library is absent.
    """
    if name not in PEERS:
        raise UsageError(f"engine {name!r} is not known: accepted are {', '.join(PEERS)}")
    if name in DRAFTING and not text:
        raise UsageError(
            f"the engine {name!r} gains by guessing a text, which random weights do not have: give a model with a "
            "tokenizer, or leave it out of --engines"
        )
    # Each engine's libraries are imported only when it is asked for.
    if name == "fast" or name in QUANTIZED:
        from skipdecode.performance.bench.peers.fast import EnginePeer

        kind: Any = name.partition("-")[2] or None
        return EnginePeer(model, quantization=kind)
    if name.startswith("llama.cpp-"):
        from skipdecode.performance.bench.peers.llama_cpp import LlamaCppPeer

        return LlamaCppPeer(model, name.removeprefix("llama.cpp-"))
    if name == "vllm":
        from skipdecode.performance.bench.peers.vllm import VllmPeer

        return VllmPeer(model)
    from skipdecode.performance.bench.peers import generate

    if name == "prompt-lookup":
        return generate.PromptLookupPeer(model, text or [])
    if name == "early-exit":
        return generate.EarlyExitPeer(model, text or [], exit_layer or max(1, model.config.num_hidden_layers // 4))
    plain = {kind.name: kind for kind in (generate.TransformersPeer, generate.StaticPeer, generate.GatedPeer)}
    return plain[name](model)
