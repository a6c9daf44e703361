"""The engine takes token ids and gives a `StepOutput` for every new token. It does not know text.

`Engine.submit` (base.py) makes a `Sequence` (sequence.py) of a user's `Request` (requests.py). The sequence waits in
the `Scheduler` (scheduler.py) and gets a slot and pages (kv.py). Its tokens become `TokenRows` (scheduler.py) of the
`FastModel` (fast_model.py), which is read from a transformers model (model_spec.py). The schedule of the sequence gives
the layers of each token. The `Sampler` of the sequence (sampling.py) chooses each new token. `FastEngine` (fast.py)
decides what each forward runs, and runs it on the C++ kernels. `GatedEngine` (gated.py) decodes through transformers.
`load` (opening.py) loads a model by its name; `open_engines` (opening.py) chooses the fast engine if it supports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skipdecode.engine.base import Engine
from skipdecode.engine.requests import Request, Sampling, StepOutput

if TYPE_CHECKING:
    from skipdecode.engine.fast import FastEngine
    from skipdecode.engine.gated import GatedEngine
    from skipdecode.engine.opening import open_engines

__all__ = [
    "Engine",
    "FastEngine",
    "GatedEngine",
    "Request",
    "Sampling",
    "StepOutput",
    "open_engines",
]

_MODULES = {"FastEngine": "fast", "GatedEngine": "gated", "open_engines": "opening"}


def __getattr__(name: str) -> Any:
    # Scheduling is pure Python, so torch is imported on first use only.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"skipdecode.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'skipdecode.engine' has no attribute {name!r}")
