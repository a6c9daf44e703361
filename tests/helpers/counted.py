"""A clock that only work moves on, so that what is measured is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer

from skipdecode.engine import base, fast, gated
from skipdecode.engine.fast_model import FastModel

FIXED, LAYER, TOKEN, CACHED, STORED = 1.0, 0.25, 0.0625, 2**-10, 2**-6
"""Seconds of a forward of the fast engine, of each layer that it runs, of each token in it, of each cached token read,
of each token that is projected.

Powers of two, whose sums are exact. A forward through transformers costs its layers alone, at 1 s each.
"""


def count_time(monkeypatch: Any) -> SimpleNamespace:
    """Replace the engines' clock; returns it (`now`)."""
    clock = SimpleNamespace(now=0.0)
    for module in (base, fast, gated):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    call = GradientCheckpointingLayer.__call__
    forward = FastModel.forward

    def counted_forward(model: Any, rows: Any, kv: Any) -> Any:
        clock.now += FIXED
        for stored, runs, end in rows.layers:
            clock.now += STORED * (runs - stored)
            if runs < end:
                clock.now += LAYER + (end - runs) * TOKEN
            if len(set(rows.slots)) == len(rows.slots):  # a decode step: prompts are not charged for attention
                clock.now += CACHED * sum(position + 1 for position in rows.positions[runs:end])
        return forward(model, rows, kv)

    def counted_layer(layer: Any, *arguments: Any, **keywords: Any) -> Any:
        clock.now += arguments[0].device.type != "meta"  # where parameters are counted
        return call(layer, *arguments, **keywords)

    monkeypatch.setattr(FastModel, "forward", counted_forward)
    monkeypatch.setattr(GradientCheckpointingLayer, "__call__", counted_layer)
    return clock
