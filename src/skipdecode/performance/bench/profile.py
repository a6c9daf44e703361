"""Profiles decode steps: torch.profiler over a few steps, and the times that the C++ kernels report.

Only the backends of this package can be profiled. For transformers, the entries are torch's operators.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from skipdecode.engine import sampling
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.fast_model import FastModel
from skipdecode.engine.kernels.spec import StackInput
from skipdecode.engine.opening import Backend, GenerateBackend
from skipdecode.performance.bench.measure import open_filled, step_seconds
from skipdecode.performance.bench.workload import Workload
from skipdecode.performance.measure import Shape, token_times
from skipdecode.schedule import Schedule

# Phases of a layer in the C++ kernels, in the order of their times.
_PHASES = ("qkv", "append", "attention", "out", "mlp_in", "mlp_out")
_PARTS = {"embed", *_PHASES, "layers", "head", "sampling", "cache"}
_STEPS = 16
_SHOWN = 12


def profile(backends: Sequence[Backend], workload: Workload) -> dict[str, Any]:
    """Run every backend of this package for a few steps under each schedule; other backends are skipped.

    Returns
    -------
    dict
        ``rows``: one for each backend, batch, prompt length, nominal speed-up and kind of work, with its time a step;
        ``traceEvents``: Chrome's trace format.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr
    found: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    runs = 0
    for batch, prompt in workload.sizes:
        shape = Shape(batch, prompt, min(workload.new, _STEPS + 1))
        for backend in backends:
            if type(backend) not in (Backend, GenerateBackend):
                continue
            for nominal, schedule in workload.schedules(backend.num_layers).items():
                if nominal > 1 and not backend.runs_schedules:
                    continue
                table, trace = _recorded(backend, schedule, shape)
                runs += 1
                what = {"engine": backend.name, "batch": batch, "prompt": prompt, "nominal_speedup": nominal}
                name = {"name": f"{backend.name}, batch {batch}, prompt {prompt}, nominal {nominal:g}x"}
                found += [what | row for row in table]
                events.append({"name": "process_name", "ph": "M", "pid": runs, "args": name})
                events += [event | {"pid": runs} for event in trace if event["ph"] == "X"]
    return {"rows": found, "traceEvents": events}


def _recorded(backend: Backend, schedule: Schedule, shape: Shape) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The table and the trace of one run."""
    step_seconds(backend, schedule, shape)  # warms up
    on_gpu = backend.model.device.type == "cuda"
    engine, phases = open_filled(backend, schedule, shape), dict.fromkeys(_PHASES, 0.0)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with _labelled(engine, phases), torch.profiler.profile(activities=activities) as recorded:
        start = time.perf_counter()
        first, *_, last = token_times(engine, shape)
    averages = {event.key: event for event in recorded.key_averages()}
    seconds = {k: (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6 for k, e in averages.items()}
    if any(phases.values()):
        seconds = seconds | phases | {"layers": seconds["layers"] - sum(phases.values())}
    calls = {kind: event.count for kind, event in averages.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    if isinstance(engine, FastEngine):
        return _table(seconds, calls, last - first, shape.new - 1), trace
    return _table(seconds, calls, last - start, shape.new), trace  # the last token of the prompt has a step, too


def _table(seconds: dict[str, float], calls: dict[str, int], total: float, steps: int) -> list[dict[str, Any]]:
    """The parts of the engine and the longest operators, the sum of the others, and the remaining time, "host"."""
    most = sorted(seconds, key=lambda kind: (kind not in _PARTS, -seconds[kind]))
    shown = {kind: seconds[kind] for kind in most[:_SHOWN]}
    shown["other"] = sum(seconds.values()) - sum(shown.values())
    shown["host"] = total - sum(seconds.values())
    return [
        {
            "kind": kind,
            "calls_per_step": calls[kind] / steps if kind in calls else None,
            "us_per_call": took / calls[kind] * 1e6 if kind in calls else None,
            "ms_per_step": took / steps * 1e3,
            "share": took / total,
        }
        for kind, took in shown.items()
    ]


@contextmanager
def _replaced(attributes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """While this holds, each (object, attribute) gives the value instead of what is there."""
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, held in before:
            if held is None:
                delattr(owner, name)  # the class's method shows again
            else:
                setattr(owner, name, held)


@contextmanager
def _labelled(engine: Any, phases: dict[str, float]) -> Iterator[None]:
    """While this holds, the parts of a step have names in a profile, and `phases` sums the times of the kernels."""

    def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def labelled(*arguments: Any, **keywords: Any) -> Any:
            with record_function(name):
                return call(*arguments, **keywords)

        return labelled

    choice = named("sampling", sampling.Predicted.token)
    calls: list[tuple[Any, str, Callable[..., Any]]] = [(sampling.Predicted, "token", choice)]
    if isinstance(engine, FastEngine):
        model, kv = engine.model, engine.kv
        calls += [(kv, name, named("cache", getattr(kv, name))) for name in ("extend", "drop", "close")]
        calls += [(model, f"_{name}", named(name, getattr(model, f"_{name}"))) for name in ("embed", "head")]
        calls.append((model, "_stack", named("layers", _timed(model, phases))))
    with _replaced(calls):
        yield


def _timed(model: FastModel, phases: dict[str, float]) -> Callable[[StackInput], None]:
    """The call of the layers, whose kernels report the time of their phases."""
    stack, seconds = model._stack, (ctypes.c_double * len(_PHASES))()

    def run(given: StackInput) -> None:
        ctypes.memset(seconds, 0, ctypes.sizeof(seconds))
        stack._args.seconds = ctypes.addressof(seconds)
        stack(given)
        stack._args.seconds = None
        for kind, took in zip(_PHASES, seconds, strict=True):
            phases[kind] += took

    return run
