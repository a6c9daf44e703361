"""The engine: token ids in, a `StepOutput` for every new token out. Knows nothing about text.

A user's `Request` (requests.py) becomes a `Sequence` (sequence.py) in `Engine.submit` (base.py), and stays that object
to its last token. It waits in the `Scheduler` (scheduler.py) and gets a slot and pages (kv.py). Its prompt and then its
tokens run in batches (batch.py) through the `FastModel` (fast_model.py), which is read from a transformers model
(model_spec.py), on the layers that its `Schedule` says (depth.py). Its `Sampler` (sampling.py) chooses each token, a
`StepOutput`. `DecodeLoop` (loop.py) says what each forward runs; `FastEngine` (fast.py) runs it on the C++ kernels, and
`skipdecode.performance.simulation` on a cost model. `GatedEngine` (gated.py) decodes through transformers.
`open_engines` (opening.py) takes the fast one where it covers the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from skipdecode.engine.base import Engine
from skipdecode.engine.requests import Request, Sampling, StepOutput

if TYPE_CHECKING:
    from skipdecode.engine.fast import FastEngine
    from skipdecode.engine.gated import GatedEngine
    from skipdecode.engine.generate import GenerateEngine
    from skipdecode.engine.opening import open_engines

__all__ = [
    "Engine",
    "FastEngine",
    "GatedEngine",
    "GenerateEngine",
    "Request",
    "Sampling",
    "StepOutput",
    "open_engines",
]

_MODULES = {"FastEngine": "fast", "GatedEngine": "gated", "GenerateEngine": "generate", "open_engines": "opening"}


def __getattr__(name: str) -> Any:
    # torch on first use only: scheduling is pure Python.
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"skipdecode.engine.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'skipdecode.engine' has no attribute {name!r}")
