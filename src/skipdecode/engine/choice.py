"""The engine for a model: the fast path where there is one, else transformers' forward, with the reason."""

from __future__ import annotations

import warnings
from typing import Any

from skipdecode.engine.fast import Engine
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.kernels import KernelChoice
from skipdecode.errors import UnfitModelError
from skipdecode.schedule import Schedule

__all__ = ["open_engine"]


def open_engine(
    model: Any, schedule: Schedule, *, max_rows: int = 8, join_below: float = 0.0, kernel: KernelChoice = "auto"
) -> Engine | GatedEngine:
    """An engine whose `run(requests)` yields `StepOutput`s; warns, with the reason, where it is not the fast one.

    Parameters are those of `Engine`. Raises `UnsupportedModelError` if the model cannot skip layers at all.
    """
    try:
        return Engine(model, schedule, max_rows=max_rows, join_below=join_below, kernel=kernel)
    except UnfitModelError as error:
        warnings.warn(f"decoding through transformers, several times slower: {error}", stacklevel=2)
        return GatedEngine(model, schedule, max_rows=max_rows)
