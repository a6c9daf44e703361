"""The engine against the oracle, against transformers, and against itself in other batches; who joins a batch when."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

from engine_tools import FAST
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request, Sampling
from skipdecode.engine.scheduler import Scheduler
from skipdecode.engine.sequence import Sequence
from skipdecode.errors import ScheduleError, UnfitModelError, UsageError
from skipdecode.models.families import family_of
from skipdecode.schedule.order import top_down
from tiny import LAYERS, VOCAB, tiny_model

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


def engine(model, schedule, **options):
    with warnings.catch_warnings():
        # Without a compiler the engine says that it runs through torch; what it computes is the same.
        warnings.simplefilter("ignore", UserWarning)
        return FastEngine(model, schedule, **options)


def decode(model, schedule, requests, **options):
    outputs = [[] for _ in requests]
    for out in engine(model, schedule, **options).run(requests):
        assert out.position == len(outputs[out.request])
        outputs[out.request].append(out)
    return outputs


def tokens(outputs):
    return [[o.token for o in row] for row in outputs]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("family", FAST)
def test_greedy_output_is_the_oracles(family, schedule):
    model = tiny_model(family)
    if schedule.projected and family_of(family).recurrent:
        with pytest.raises(ScheduleError, match="recurrent states"):
            engine(model, schedule)
        return
    rows = decode(model, schedule, [Request(p, NEW) for p in PROMPTS])
    for prompt, row in zip(PROMPTS, rows, strict=True):
        text = torch.tensor([[*prompt, *(o.token for o in row)]])
        active = active_tokens(schedule, len(prompt), text.shape[1])
        with torch.no_grad():
            logits = oracle_logits(model, text, torch.ones_like(text), active)[0, len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1)[torch.arange(NEW), text[0, len(prompt) :]]
        torch.testing.assert_close(picked, logits.log_softmax(-1).max(-1).values, rtol=0, atol=1e-4)
        torch.testing.assert_close(torch.tensor([o.logprob for o in row]), picked, rtol=0, atol=1e-3)
        depths = [len(schedule.last_prompt_layers()), *(schedule.budget(i) for i in range(NEW - 1))]
        assert [o.layers for o in row] == depths


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
    together = tokens(decode(model, schedule, requests))
    assert together == tokens(decode(model, schedule, requests, **options))
    assert together == tokens(decode(model, schedule, requests[::-1]))[::-1]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_prompts_that_share_forwards_with_rows_of_all_ages_change_nothing(schedule):
    model, prompts = tiny_model("llama"), [*PROMPTS, tuple(range(90, 20, -1))]
    alone = [tokens(decode(model, schedule, [Request(p, NEW)]))[0] for p in prompts]
    # 9 tokens of prompts a forward: the second row's prompt begins and the third's runs while the first decodes, …
    run = engine(model, schedule, refill_below=1, in_order=True, prompt_tokens=9)
    rows = [[] for _ in prompts]
    for out in run.run([Request(p, NEW) for p in prompts]):
        rows[out.request].append(out.token)
    assert rows == alone
    stats = run.stats
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.fed_tokens == len(prompts) * (NEW - 1)
    assert stats.token_layers == len(prompts) * sum(schedule.budget(i) for i in range(NEW - 1))
    assert stats.prompt_seconds > 0 < stats.decode_seconds


def test_the_first_token_leaves_with_the_forward_that_gave_it():
    run = engine(tiny_model("llama"), SCHEDULES["linear"], refill_below=1, prompt_tokens=16)
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


def test_long_prompts_run_in_parts():
    model = tiny_model("llama", max_position_embeddings=4096)
    long, short = tuple(3 + i % 90 for i in range(1200)), (4, 5)
    alone = [tokens(decode(model, SCHEDULES["linear"], [Request(p, 5)]))[0] for p in (long, short)]
    assert tokens(decode(model, SCHEDULES["linear"], [Request(long, 5), Request(short, 5)])) == alone
    with torch.no_grad():
        assert alone[0][0] == int(model(torch.tensor([long])).logits[0, -1].argmax())


def test_positions_beyond_the_first_table():
    model = tiny_model("llama", max_position_embeddings=8192)
    prompt = tuple(3 + i % 90 for i in range(2100))
    with torch.no_grad():
        want = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    assert tokens(decode(model, SCHEDULES["full"], [Request(prompt, 1)])) == [[want]]


def test_stops():
    model, schedule = tiny_model("llama"), SCHEDULES["full"]
    (free,) = tokens(decode(model, schedule, [Request(PROMPTS[0], NEW)]))
    at = next(i for i in range(2, NEW) if free[i] not in free[:i])
    requests = [
        Request(PROMPTS[0], NEW, stop_ids=frozenset([free[at]])),
        Request(PROMPTS[0], 3),
    ]
    rows = decode(model, schedule, requests)
    assert tokens(rows) == [free[: at + 1], free[:3]]
    assert [row[-1].finish_reason for row in rows] == ["eos", "length"]
    assert {o.finish_reason for row in rows for o in row[:-1]} == {None}


def test_the_model_stays_as_it_was_and_shares_its_weights():
    model = tiny_model("qwen2")
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        before = model(ids).logits
        first = engine(model, SCHEDULES["full"])
        second = engine(model, SCHEDULES["full"])
        assert torch.equal(model(ids).logits, before)
    attention = model.model.layers[0].self_attn
    weights = [e.model.spec.layers[0].qkv.weight for e in (first, second)]
    assert weights[0].data_ptr() == weights[1].data_ptr() == attention.q_proj.weight.data_ptr()


def test_refusals_name_the_reason():
    with pytest.raises(UnfitModelError, match="no fast path for model type 'bloom'"):
        FastEngine(tiny_model("bloom"), SCHEDULES["full"])
    model = tiny_model("opt")
    with pytest.raises(ScheduleError, match="4 layers"):
        engine(model, Schedule.full(4))
    run = engine(model, SCHEDULES["full"])
    with pytest.raises(UsageError, match="256 positions"):
        run.submit([Request((3,) * 250, 20)])
    with pytest.raises(UsageError, match=f"token {VOCAB} "):
        run.submit([Request((VOCAB,), 20)])
    with pytest.raises(UnfitModelError, match="float16"):
        FastEngine(tiny_model("llama").half(), SCHEDULES["full"])


def sequences(*new_tokens, pages=1):
    made = [Sequence(i, Request((5,) * 10, n), Schedule.full(8)) for i, n in enumerate(new_tokens)]
    for sequence in made:
        sequence.pages = pages
    return made


def lengths(admitted):
    return [sequence.request.max_new_tokens for sequence in admitted]


def test_scheduling_imports_no_torch():
    code = "import sys, skipdecode.engine.scheduler; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_static_batches_hold_requests_of_like_length_longest_first():
    scheduler = Scheduler(2)
    scheduler.submit(sequences(5, 50, 7, 40))
    assert lengths(scheduler.admit(0)) == [50, 40]
    assert scheduler.admit(2) == scheduler.admit(1) == []
    assert lengths(scheduler.admit(0)) == [7, 5]
    assert scheduler.waiting == 0


def test_refill_below_lets_the_next_group_in_when_few_are_left():
    scheduler = Scheduler(5, refill_below=0.5)
    scheduler.submit(sequences(*range(1, 9)))
    assert len(scheduler.admit(0)) == 5
    assert scheduler.admit(3) == []
    assert len(scheduler.admit(2)) == 3


def test_continuous_fills_every_free_row_in_order():
    scheduler = Scheduler(3, refill_below=1, in_order=True)
    scheduler.submit(sequences(5, 50, 7, 40))
    assert [s.number for s in scheduler.admit(0)] == [0, 1, 2]
    assert [s.number for s in scheduler.admit(2)] == [3]


def test_bad_settings_are_refused():
    with pytest.raises(UsageError, match="max_rows=0"):
        Scheduler(0)
    with pytest.raises(UsageError, match="refill_below=2"):
        Scheduler(1, 2)
