"""The engine over transformers' forward: every family, ragged rows that end at different times."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_tools import tokens_of
from skipdecode import Schedule, attach
from skipdecode.engine import FastEngine, GatedEngine, Request, Sampling
from skipdecode.errors import ScheduleError, UnsupportedModelError
from tiny import LAYERS, OPTIONS, tiny_model

PROMPTS = [(5, 6, 7, 8), (9, 4), tuple(range(3, 20)), (11, 12, 13, 14, 15, 16, 17)]
SCHEDULE = Schedule.from_speedup(LAYERS, 2, 8)


@pytest.mark.parametrize("family", sorted(set(OPTIONS) - {"mixtral", "qwen2_moe", "qwen3_moe"}))
def test_rows_are_those_of_generate_one_by_one(family):
    model = tiny_model(family)
    requests = [Request(p, 4 + 2 * i) for i, p in enumerate(PROMPTS)]
    got = tokens_of(GatedEngine(model, SCHEDULE, max_rows=3), requests)
    with attach(model, SCHEDULE):
        for request, row in zip(requests, got, strict=True):
            ids = torch.tensor([request.prompt])
            want = model.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False)
            assert row == want[0, ids.shape[1] :].tolist()


def test_it_samples_stops_and_numbers_like_the_fast_engine():
    model = tiny_model("llama")
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_k=9, seed=4), Sampling()]
    requests = [Request(p, 9, s, frozenset(range(60, 70))) for p, s in zip(PROMPTS, samplings, strict=True)]
    slow = [(*o[:3], o.layers, o.finish_reason) for o in GatedEngine(model, SCHEDULE).run(requests)]
    fast = [(*o[:3], o.layers, o.finish_reason) for o in FastEngine(model, SCHEDULE).run(requests)]
    assert sorted(slow) == sorted(fast)
    assert any(reason == "eos" for *_, reason in slow)


def test_the_model_is_free_again_even_if_the_run_is_dropped():
    model = tiny_model("gpt2")
    run = GatedEngine(model, SCHEDULE).run([Request(PROMPTS[0], 9)])
    next(run)
    run.close()
    attach(model, SCHEDULE).detach()


def test_what_it_cannot_run_is_refused():
    with pytest.raises(ScheduleError):
        GatedEngine(tiny_model("gpt2"), Schedule.full(3))
    with pytest.raises(UnsupportedModelError):
        GatedEngine(_Foreign(), SCHEDULE)


class _Foreign:
    config = SimpleNamespace(model_type="mamba")
