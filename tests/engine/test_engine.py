"""The engine against the oracle, against transformers, and against itself in other batches; who joins a batch when."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from engine_tools import FAST, check_greedy, outputs_of, tokens_of
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request, Sampling
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.scheduler import Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.models.families import family_of
from skipdecode.schedule.order import top_down
from tiny import LAYERS, VOCAB, tiny_model, uneven_model

NEW = 20
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 15, 16, 17)]
SCHEDULES = {
    "full": Schedule.full(LAYERS),
    "linear": Schedule.from_speedup(LAYERS, 2, NEW),
    "prompt": Schedule.paper(LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=12, prompt="max_exit"),
    "even": Schedule.even(LAYERS, 4),
    "top-down": Schedule(LAYERS, top_down(LAYERS, 1), (6, 4, 3)),
    "split": Schedule.split(LAYERS, 4, [5, 5, 4, 3]),
    "own": Schedule.even(LAYERS, [6, 5, 4], prompt=(0, 1, 5)),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("family", FAST)
def test_batches_rows_alone_prompts_in_parts_and_second_turns_are_the_oracles(family, schedule):
    model = uneven_model(family)
    fast = open_model(model)
    if schedule.projected and family_of(family).recurrent:
        with pytest.raises(ScheduleError, match="recurrent states"):
            FastEngine(fast, schedule)
        return
    requests = [Request(p, NEW) for p in PROMPTS]
    batch = outputs_of(FastEngine(fast, schedule, max_rows=2, refill_below=1, prompt_tokens=7), requests)
    engine = FastEngine(fast, schedule, prefix_cache=True)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        check_greedy(model, schedule, prompt, row)
        depths = [len(schedule.last_prompt_layers()), *(schedule.budget(i) for i in range(NEW - 1))]
        assert [o.layers for o in row] == depths
        (alone,) = outputs_of(engine, [Request(prompt, NEW)])
        assert [out.token for out in alone] == [out.token for out in row]
        second = (*prompt, *(out.token for out in row), 8, 9, 10)
        check_greedy(model, schedule, second, outputs_of(engine, [Request(second, NEW)])[0])
    assert (engine.stats.prefix_hit_tokens > 0) != bool(fast.rings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"max_rows": 1}, {"max_rows": 2}, {"max_rows": 3, "refill_below": 1, "in_order": True}]
)
def test_rows_do_not_depend_on_their_batch(options, dtype):
    model, schedule = tiny_model("llama").to(dtype), SCHEDULES["linear"]
    samplings = [
        Sampling(),
        Sampling(temperature=1.0, seed=7),
        Sampling(temperature=0.8, top_k=20, repetition_penalty=1.3, seed=8),
        Sampling(temperature=1.2, top_p=0.9, min_p=0.01, seed=7, logit_bias={5: 2.0}),
    ]
    requests = [Request(p, 8 + 4 * i, s) for i, (p, s) in enumerate(zip(PROMPTS, samplings, strict=True))]
    together = tokens_of(FastEngine(model, schedule), requests)
    assert together == tokens_of(FastEngine(model, schedule, **options), requests)
    assert together == tokens_of(FastEngine(model, schedule), requests[::-1])[::-1]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_prompts_that_share_forwards_with_rows_of_all_ages_change_nothing(schedule):
    model, prompts = tiny_model("llama"), [*PROMPTS, tuple(range(90, 20, -1))]
    alone = [tokens_of(FastEngine(model, schedule), [Request(p, NEW)])[0] for p in prompts]
    # 9 tokens of prompts a forward: the second row's prompt begins and the third's runs while the first decodes, …
    engine = FastEngine(model, schedule, refill_below=1, in_order=True, prompt_tokens=9)
    assert tokens_of(engine, [Request(p, NEW) for p in prompts]) == alone
    stats = engine.stats
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.fed_tokens == len(prompts) * (NEW - 1)
    assert stats.token_layers == len(prompts) * sum(schedule.budget(i) for i in range(NEW - 1))
    assert stats.prompt_seconds > 0 < stats.decode_seconds


def test_the_first_token_leaves_with_the_forward_that_gave_it():
    run = FastEngine(tiny_model("llama"), SCHEDULES["linear"], refill_below=1, prompt_tokens=16)
    forward, sizes = run.model.forward, []
    run.model.forward = lambda rows, kv: (sizes.append(len(rows.tokens)), forward(rows, kv))[1]
    run.submit([Request(PROMPTS[0], NEW)])
    assert [(o.request, o.position) for o in run.step()] == [(0, 0)]
    assert sizes == [4]
    # A prompt of 37 tokens, 16 a forward; the running row gets a token with each.
    run.submit([Request(PROMPTS[2], 1)])
    found = [[(o.request, o.position) for o in run.step()] for _ in range(3)]
    assert found == [[(0, 1)], [(0, 2)], [(1, 0), (0, 3)]]
    assert sizes == [4, 17, 17, 6]


@pytest.mark.parametrize("length", [1200, 2100], ids=["in parts", "beyond the first table of positions"])
def test_long_prompts(length):
    model, schedule = tiny_model("llama", max_position_embeddings=4096), SCHEDULES["linear"]
    requests = [Request(tuple(3 + i % 90 for i in range(length)), 5), Request((4, 5), 5)]
    alone = [tokens_of(FastEngine(model, schedule), [request])[0] for request in requests]
    assert tokens_of(FastEngine(model, schedule), requests) == alone
    with torch.no_grad():
        assert alone[0][0] == int(model(torch.tensor([requests[0].prompt])).logits[0, -1].argmax())


def test_stops():
    model, schedule = tiny_model("llama"), SCHEDULES["full"]
    (free,) = tokens_of(FastEngine(model, schedule), [Request(PROMPTS[0], NEW)])
    at = next(i for i in range(2, NEW) if free[i] not in free[:i])
    requests = [Request(PROMPTS[0], NEW, stop_ids=frozenset([free[at]])), Request(PROMPTS[0], 3)]
    rows = outputs_of(FastEngine(model, schedule), requests)
    assert [[out.token for out in row] for row in rows] == [free[: at + 1], free[:3]]
    assert [row[-1].finish_reason for row in rows] == ["eos", "length"]
    assert {o.finish_reason for row in rows for o in row[:-1]} == {None}


def test_refusals_name_the_reason():
    model = tiny_model("opt")
    with pytest.raises(ScheduleError, match="4 layers"):
        FastEngine(model, Schedule.full(4))
    run = FastEngine(model, SCHEDULES["full"])
    with pytest.raises(UsageError, match="256 positions"):
        run.submit([Request((3,) * 250, 20)])
    with pytest.raises(UsageError, match=f"token {VOCAB} "):
        run.submit([Request((VOCAB,), 20)])


def sequences(*new_tokens):
    return [Sequence(i, Request((5,) * 10, n), Schedule.full(8)) for i, n in enumerate(new_tokens)]


def test_scheduling_imports_no_torch():
    code = "import sys, skipdecode.engine.scheduler; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("options", "lengths", "admitted"),
    [
        # Static batches of requests of like length, the longest first.
        ({"max_rows": 2}, [5, 50, 7, 40], [(0, [50, 40]), (2, []), (1, []), (0, [7, 5])]),
        # The next group joins when few are left.
        ({"max_rows": 5, "refill_below": 0.5}, range(1, 9), [(0, [8, 7, 6, 5, 4]), (3, []), (2, [3, 2, 1])]),
        # Continuous batching fills every free row, in the order of submission.
        ({"max_rows": 3, "refill_below": 1, "in_order": True}, [5, 50, 7, 40], [(0, [5, 50, 7]), (2, [40])]),
    ],
    ids=["static", "refill", "continuous"],
)
def test_who_joins_the_batch_when(options, lengths, admitted):
    scheduler = Scheduler(**options)
    scheduler.submit(sequences(*lengths))
    for running, joining in admitted:
        assert [sequence.request.max_new_tokens for sequence in scheduler.admit(running)] == joining
    assert scheduler.waiting == 0


def test_bad_settings_are_refused():
    with pytest.raises(UsageError, match="max_rows=0"):
        Scheduler(0)
    with pytest.raises(UsageError, match="refill_below=2"):
        Scheduler(1, 2)
