"""Batches of token ids through gated transformers: tokens, sampling, ends, and what they cost."""

from __future__ import annotations

from typing import Any

import pytest

from engine_tools import decode
from skipdecode import Schedule
from skipdecode.engine import FastEngine, GatedEngine, Request
from tiny import LAYERS, tiny_model

PAPER = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
FULL = Schedule.full(LAYERS)
PROMPTS = [[5, 9, 33], [40, 41, 42, 43, 44, 45, 46], [7], [100, 90, 80, 70]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_layers_and_bytes_are_those_of_the_schedule(model: Any):
    engine = GatedEngine(model, PAPER)
    decode(engine, PROMPTS, 10)
    stats, layers = engine.stats, sum(PAPER.budget(i) for i in range(9))
    assert (stats.steps, stats.token_layers) == (9, 4 * layers)
    per_token = 2 * 2 * 8 * 4 * len(PROMPTS)  # keys and values, heads, head size, fp32, rows
    assert stats.kv_bytes_peak == per_token * max(7 * LAYERS, *((8 + i) * PAPER.budget(i) for i in range(9)))
    assert stats.kv_bytes_full_peak == per_token * (7 + 9) * LAYERS
    engine = GatedEngine(model, FULL)
    decode(engine, PROMPTS, 10)
    full = stats.kv_bytes_full_peak
    assert (engine.stats.kv_bytes_peak, engine.stats.kv_bytes_full_peak) == (full, full)


@pytest.mark.parametrize("kind", [FastEngine, GatedEngine])
def test_a_cancelled_row_leaves_the_others_as_they_are(model: Any, kind: Any):
    plain, _ = decode(kind(model, PAPER), PROMPTS, 10)
    engine = kind(model, PAPER)
    rows: list[list[int]] = [[] for _ in PROMPTS]
    engine.submit([Request(tuple(prompt), 10) for prompt in PROMPTS])
    while engine.has_work:
        for out in engine.step():
            rows[out.request].append(out.token)
            if (out.request, out.position) == (1, 3):
                engine.cancel(1)
    assert rows == [row[:4] if number == 1 else row for number, row in enumerate(plain)]


def test_requests_of_several_schedules_run_in_waves_of_their_own(model: Any):
    engine = GatedEngine(model, PAPER, max_rows=3, in_order=True)
    numbers = engine.submit([Request(tuple(p), 10) for p in PROMPTS[:2]])
    numbers += engine.submit([Request(tuple(p), 10) for p in PROMPTS[2:]], FULL)
    rows: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.has_work:
        for out in engine.step():
            rows[out.request].append(out.token)
    wanted = (
        decode(GatedEngine(model, PAPER), PROMPTS[:2], 10)[0] + decode(GatedEngine(model, FULL), PROMPTS[2:], 10)[0]
    )
    assert list(rows.values()) == wanted


def test_checkpoint_defaults_do_not_change_what_was_asked_for(model: Any):
    plain = decode(GatedEngine(model, PAPER), PROMPTS, 10)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    try:
        assert decode(GatedEngine(model, PAPER), PROMPTS, 10) == plain
    finally:
        model.generation_config.repetition_penalty, model.generation_config.do_sample = 1.0, False
