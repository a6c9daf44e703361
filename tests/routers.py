"""A router of tiny models, with drawn weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from skipdecode import Schedule
from skipdecode.engine.adaptive import Router, identity
from tiny import LAYERS

ORDER = (1, 2, 3, 4, 5, 6)


def router_for(model: Any, prompt: Any = "full", spread: float = 0.6, **changes: Any) -> Router:
    """Of four depths, with drawn weights: requests differ in what they choose."""
    depths = tuple(
        Schedule(LAYERS, ORDER, budgets, prompt=prompt, name=name)
        for name, budgets in (("full", (8,)), ("falling", (6, 6, 5, 4)), ("five", (5, 5, 4)), ("flat", (3,)))
    )
    random = np.random.RandomState(3)
    centre = np.array([3.0, -2.0, 0.5, 2.0, *([0.0] * 32)])
    weights = tuple((*row.tolist(), -float(row @ centre)) for row in random.randn(3, 36) * spread)
    values = {
        "depths": depths,
        "costs": (1.0, 0.8, 0.7, 0.5),
        "weights": weights,
        "penalties": ((1.0, 0.0), (2.0, 4.0)),
        "speedup": 1.4,
        "thresholds": (-2.9, -2.3, -1.2),
        "model": identity(model),
    }
    return Router(**values | changes)
