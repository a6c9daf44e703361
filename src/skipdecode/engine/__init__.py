"""Decoding: token ids in, a generator of per-step outputs out. Knows nothing about text.

A request's life: `Request` (requests.py) -> waits in the `Scheduler` (scheduler.py) -> gets a slot and pages (kv.py) ->
its prompt and then its tokens run through the `FastModel` (fast_model.py), read from a transformers model
(model_spec.py), on the layers that the `BudgetPolicy` (depth.py) grants -> `RowSampler` (sampling.py) -> `StepOutput`.
`Engine` (fast.py) is the loop. Without the C++ kernels, as on GPUs, `DenseModel` (dense_model.py) and `StaticKV`
(static_kv.py) stand for model and pages. `open_engine` takes the fast path where there is one, else `GatedEngine`
(gated.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.engine.choice import open_engine
    from skipdecode.engine.depth import BudgetPolicy, SchedulePolicy
    from skipdecode.engine.fast import Engine
    from skipdecode.engine.gated import GatedEngine
    from skipdecode.engine.requests import Request, Sampling, StepOutput

__all__ = [
    "BudgetPolicy",
    "Engine",
    "GatedEngine",
    "Request",
    "Sampling",
    "SchedulePolicy",
    "StepOutput",
    "open_engine",
]

_MODULES = {
    "BudgetPolicy": "depth",
    "Engine": "fast",
    "GatedEngine": "gated",
    "Request": "requests",
    "Sampling": "requests",
    "SchedulePolicy": "depth",
    "StepOutput": "requests",
    "open_engine": "choice",
}


def __getattr__(name: str) -> Any:
    # torch on first use only: scheduling is pure Python.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"skipdecode.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'skipdecode.engine' has no attribute {name!r}")
