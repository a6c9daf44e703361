"""What a server needs of the engine: schedules in one batch, cancelling what waits, likeliest tokens."""

from __future__ import annotations

import pytest
import torch

from checkpoints import byte_tokenizer
from engine_tools import always_drafts, outputs_of
from kernel_reference import kernels_or_skip
from serve_tools import greedy, metric, running, tiny_service
from skipdecode import Schedule
from skipdecode.engine import FastEngine, GatedEngine, Request, Sampling
from skipdecode.schedule.order import top_down
from skipdecode.serving.service import open_service
from tiny import LAYERS, tiny_model

NEW = 12
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13)]
SCHEDULES = [
    Schedule.full(LAYERS),
    Schedule.from_speedup(LAYERS, 2, NEW),
    Schedule.constant(LAYERS, 3),
    Schedule.paper(LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=8, prompt="max_exit"),
]


OTHER_ORDERS = [
    Schedule(LAYERS, top_down(LAYERS, 1), (LAYERS - 1, LAYERS - 2, 4)),
    Schedule.even(LAYERS, (6, 5, 4)),
    Schedule(LAYERS, (3, 5, 1), (LAYERS - 1, LAYERS - 3), prompt="max_exit"),
    Schedule.from_speedup(LAYERS, 2, NEW).with_prompt((0, 1, 2)),
]


@pytest.mark.parametrize("schedules", [SCHEDULES, OTHER_ORDERS, SCHEDULES + OTHER_ORDERS], ids=["one order", "4", "5"])
@pytest.mark.parametrize("exact", [False, True])
def test_schedules_of_any_drop_order_share_an_engine(schedules, exact, monkeypatch):
    always_drafts(monkeypatch)
    model = tiny_model("llama")
    engine = FastEngine(model, SCHEDULES[0], max_rows=6, refill_below=1, prompt_tokens=37, prefix_cache=True)
    rows = [(Request(p, NEW, exact=exact and len(p) == 3), s) for s in schedules for p in PROMPTS]
    for request, schedule in rows:
        engine.submit([request], schedule)
    for (request, schedule), row in zip(rows, outputs_of(engine), strict=True):
        alone = list(FastEngine(model, schedule).run([request]))
        assert [(o.token, o.layers) for o in row] == [(o.token, o.layers) for o in alone]
    assert engine.kv.bytes_held == 0


def test_rows_of_one_drop_order_share_a_forward():
    model, full = tiny_model("llama"), Schedule.full(LAYERS)
    steps = []
    for schedules in ([SCHEDULES[1], SCHEDULES[2], full], [SCHEDULES[2], OTHER_ORDERS[0], full]):
        engine = FastEngine(model, full, max_rows=3)
        for schedule in schedules:
            engine.submit([Request(PROMPTS[1], NEW, exact=False)], schedule)
        engine.decode([])
        steps.append(engine.stats.steps)
    assert steps[0] == NEW - 1
    assert steps[0] < steps[1] <= 2 * steps[0]


def test_a_running_row_of_the_server_waits_for_a_part_of_a_long_prompt():
    kernels_or_skip()
    model = tiny_model("llama", max_position_embeddings=1024)
    engine = open_service(model, byte_tokenizer(), name="tiny", checkpoint_schedule=SCHEDULES[1]).worker._make_engine()
    first, long = engine.submit([Request(PROMPTS[0], 20), Request(tuple(3 + i % 90 for i in range(600)), 1)])
    order = [out.request for out in engine.run([])]
    # 124 tokens of the long prompt beside the short one, then 128 at a time, each with a token of the first row.
    assert order.index(long) == 4
    assert order[:4] == [first] * 4


def test_cancel_drops_what_waits():
    engine = FastEngine(tiny_model("llama"), SCHEDULES[0], max_rows=1, in_order=True)
    first, second, third = engine.submit([Request(p, 3) for p in PROMPTS[:3]])
    engine.step()
    assert engine.rows == 1
    engine.cancel(second)
    engine.cancel(second)
    assert {o.request for o in engine.run([])} == {first, third}


@pytest.mark.parametrize("kind", [FastEngine, GatedEngine])
def test_likeliest_tokens(kind):
    model = tiny_model("llama")
    requests = [Request(PROMPTS[0], 2, Sampling(top_logprobs=5)), Request(PROMPTS[1], 2)]
    rows = [list(kind(model, SCHEDULES[0]).run([r])) for r in requests]
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    values, tokens = logprobs.topk(5)
    assert [t for t, _ in rows[0][0].top] == tokens.tolist()
    torch.testing.assert_close(torch.tensor([v for _, v in rows[0][0].top]), values, rtol=0, atol=1e-3)
    assert rows[0][0].top[0] == (rows[0][0].token, pytest.approx(rows[0][0].logprob, abs=1e-5))
    assert rows[1][0].top == ()


@pytest.mark.parametrize("shared", [True, False])
def test_earlier_answers_are_drafted_where_users_may_know_of_each_other(shared, monkeypatch):
    always_drafts(monkeypatch, 8)
    service = tiny_service(prefix_cache=shared)
    asked = greedy(prompt="hello", max_tokens=40)
    with running(service) as client:
        accepted = [0.0]
        for _ in range(2):
            client.post("/v1/completions", json=asked)
            accepted.append(metric(service, "accepted_tokens_total"))
    assert (accepted[2] - accepted[1] > accepted[1]) == shared
    assert metric(service, "drafted_tokens_total") >= accepted[2]
