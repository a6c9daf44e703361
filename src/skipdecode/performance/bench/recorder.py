"""Times calls from outside: where the time of decode steps goes, as a table and as a trace that Perfetto opens.

A call that runs inside another is taken off the outer one's *own* time, so own times add up. Nothing of this is in the
way of a run that is not profiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from skipdecode.performance.machine import synchronize

__all__ = ["HOST", "KINDS", "Call", "Part", "Recorder", "replaced"]

Call = tuple[Any, str, Callable[..., Any]]
"""An object, one of its attributes, and the call that is to stand there."""

HOST = "host"
# In the order of a step. Norms and activations count with the product that they are fused into in the fast engine.
KINDS = (
    "embedding",
    "qkv",
    "append",  # of the new keys and values
    "attention",
    "out",
    "mlp_in",
    "mlp_out",
    "layer",  # what is in none of these
    "head",
    "sampling",
    "cache",  # the engine's books of pages
    HOST,
)
_TRACE_STEPS = 16


class _Event(NamedTuple):
    """Calls of a kind: seconds from the begin, in all and less what ran inside, and the bytes they must read."""

    kind: str
    layer: int | None
    start: float
    seconds: float
    own: float
    num_bytes: float
    calls: int = 1


class Part(NamedTuple):
    """What ran inside a call that told the time itself, all calls of a kind together."""

    kind: str
    seconds: float
    num_bytes: float
    calls: int


class Recorder:
    """The calls of one run.

    Parameters
    ----------
    device : torch.device
        Waited for after each call: on a GPU the profile is of kernels one by one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = time.perf_counter()
        self._inside = 0.0
        self._events: list[_Event] = []
        self._steps: list[tuple[float, float]] = []

    def timed(
        self,
        kind: str,
        call: Callable[..., Any],
        layer: int | None = None,
        num_bytes: float = 0.0,
        parts: Callable[[], list[Part]] = list,
    ) -> Callable[..., Any]:
        """`call`, noted under `kind` whenever it runs.

        `parts` say afterwards what ran inside a call that tells it itself; a trace shows them one after another.
        """

        def noted(*arguments: Any, **keywords: Any) -> Any:
            outer, self._inside = self._inside, 0.0
            start = time.perf_counter()
            result = call(*arguments, **keywords)
            synchronize(self._device)
            took = time.perf_counter() - start
            at, inside = start - self._begin, parts()
            own = took - self._inside - sum(part.seconds for part in inside)
            self._events.append(_Event(kind, layer, at, took, own, num_bytes))
            for part in inside:
                self._events.append(_Event(part.kind, None, at, part.seconds, *part[1:]))
                at += part.seconds
            self._inside = outer + took
            return result

        return noted

    def add_steps(self, times: list[float]) -> None:
        """Say when the steps began and ended: each at the next time of `time.perf_counter`."""
        marks = [t - self._begin for t in times]
        self._steps += pairwise(marks)

    # ------------------------------------------------------------------ what came out

    def table(self, bandwidth: float) -> list[dict[str, Any]]:
        """One row a kind, "host" being what no call accounts for; per step.

        Parameters
        ----------
        bandwidth : float
            Bytes a second that count as all of it.
        """
        count = len(self._steps)
        first, last = self._steps[0][0], self._steps[-1][1]
        inside = [e for e in self._events if first <= e.start < last]
        own = {kind: sum(e.own for e in inside if e.kind == kind) for kind in KINDS}
        total = sum(end - start for start, end in self._steps)
        own[HOST] = total - sum(own.values())
        rows = []
        for kind, seconds in own.items():
            mine = [e for e in inside if e.kind == kind]
            calls = sum(e.calls for e in mine)
            rate = sum(e.num_bytes for e in mine) / seconds if seconds > 0 else 0.0
            if mine or kind == HOST:
                rows.append(
                    {
                        "kind": kind,
                        "calls_per_step": calls / count,
                        "us_per_call": seconds / calls * 1e6 if calls else None,
                        "ms_per_step": seconds / count * 1e3,
                        "share": seconds / total,
                        "gb_per_s": rate / 1e9 or None,
                        "bandwidth_share": rate / bandwidth or None,
                    }
                )
        return rows

    def trace(self, process: int, name: str) -> list[dict[str, Any]]:
        """Chrome trace events of the first 16 steps, as one process of a trace."""
        steps = self._steps[:_TRACE_STEPS]
        first, last = steps[0][0], steps[-1][1]

        def event(what: str, kind: str, start: float, seconds: float) -> dict[str, Any]:
            times = {"ts": start * 1e6, "dur": seconds * 1e6}
            return {"name": what, "cat": kind, "ph": "X", "pid": process, "tid": 0} | times

        whole = [event(f"step {i}", "step", start, end - start) for i, (start, end) in enumerate(steps)]
        calls = [
            event(e.kind, "call", e.start, e.seconds) | ({} if e.layer is None else {"args": {"layer": e.layer}})
            for e in self._events
            if first <= e.start < last
        ]
        return [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}, *whole, *calls]


@contextmanager
def replaced(calls: list[Call]) -> Iterator[None]:
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
