"""The engine takes token ids and gives a `StepOutput` for every new token. It does not know text.

`open_engines` (opening.py) chooses `FastEngine` (fast.py), on C++ kernels, if it supports the model, else `GatedEngine`
(gated.py), on transformers. A user's `Request` (requests.py) is a `Sequence` (sequence.py) in the engine. The
`Scheduler` (scheduler.py) admits it, its tokens are rows of forwards (rows.py) of the `FastModel` (fast_model.py), its
keys and values lie in pages (kv.py, prefix_cache.py), and its `Sampler` (sampling.py) chooses new tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skipdecode.engine.base import Engine
from skipdecode.engine.requests import Request, Sampling, StepOutput

if TYPE_CHECKING:
    from skipdecode.engine.fast import FastEngine
    from skipdecode.engine.gated import GatedEngine
    from skipdecode.engine.opening import open_engines

__all__ = ["Engine", "FastEngine", "GatedEngine", "Request", "Sampling", "StepOutput", "open_engines"]

_MODULES = {"FastEngine": "fast", "GatedEngine": "gated", "open_engines": "opening"}


def __getattr__(name: str) -> Any:
    # Scheduling is pure Python, so torch is imported on first use only.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"skipdecode.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'skipdecode.engine' has no attribute {name!r}")
