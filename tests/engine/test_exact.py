"""Exact requests have the tokens of plain full depth, whatever drafts them, how many, and beside whom."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from engine_tools import Always
from skipdecode import Schedule
from skipdecode.engine import FastEngine, GatedEngine, Request, Sampling
from skipdecode.engine.drafts import Acceptance, ForwardTimes, Planner
from skipdecode.engine.fast_model import open_model
from skipdecode.errors import UsageError
from tiny import LAYERS, tiny_model

NEW = 24
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13)]
FULL = Schedule.full(LAYERS)
DRAFTING = {
    "constant": Schedule.even(LAYERS, 4),
    "falling": Schedule.from_speedup(LAYERS, 2, NEW),
    "split": Schedule.split(LAYERS, 4, [5, 5, 4, 3]),
    "text": FULL,
}
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.5, seed=7),
    Sampling(temperature=0.8, top_k=20, repetition_penalty=1.3, seed=8),
    Sampling(frequency_penalty=0.5, logit_bias={5: 2.0, 40: -3.0}, top_logprobs=2),
]


def engine(model, schedule, count=3, **options):
    made = FastEngine(model, schedule, **options)
    made.planner = Always(count)
    return made


def requests(exact, samplings=SAMPLINGS, new=NEW, stop_ids=frozenset()):
    pairs = zip(PROMPTS, samplings, strict=True)
    return [Request(p, new - 4 * i, s, stop_ids, exact=exact) for i, (p, s) in enumerate(pairs)]


def tokens(made, asked):
    return [row.tokens for row in made.decode(asked)]


@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_full_depth_in_ragged_batches(drafting, dtype):
    model = open_model(tiny_model("llama").to(dtype))
    want = tokens(FastEngine(model, FULL), requests(False))
    for count in (1, 3, 8):
        made = engine(model, DRAFTING[drafting], count, max_rows=3, refill_below=1, in_order=True, prompt_tokens=9)
        assert tokens(made, requests(True)) == want
        assert made.stats.drafted_tokens > 0
        assert made.kv_bytes == 0


@pytest.mark.parametrize("quantization", ["int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt"])
def test_tokens_are_those_of_full_depth_in_every_kind_of_weights(family, quantization):
    model = open_model(tiny_model(family), quantization)
    want = tokens(FastEngine(model, FULL), requests(False))
    assert tokens(engine(model, DRAFTING["falling"]), requests(True)) == want


def test_log_probabilities_and_the_likeliest_are_those_of_full_depth():
    model = open_model(tiny_model("llama"))
    plain = list(FastEngine(model, FULL).run(requests(False)[3:]))
    drafted = list(engine(model, DRAFTING["falling"]).run(requests(True)[3:]))
    assert [(o.token, o.logprob, o.top, o.position, o.layers) for o in drafted] == [
        (o.token, o.logprob, o.top, o.position, o.layers) for o in plain
    ]


WITHOUT_IDLE = Schedule(LAYERS, (4,), (LAYERS - 1,))


def idle(*layers):
    """A model of which some layers do nothing: drafts without them are right."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in layers:
            for linear in (model.model.layers[layer].self_attn.o_proj, model.model.layers[layer].mlp.down_proj):
                linear.weight.zero_()
    return model


def test_full_depth_takes_all_drafts_that_are_right():
    made = engine(open_model(idle(4)), WITHOUT_IDLE)
    made.planner = Always(3, layers=True)
    (row,) = made.decode([Request(PROMPTS[0], 21, exact=True)])
    stats = made.stats
    assert len(row.tokens) == 21
    assert (stats.steps, stats.drafted_tokens, stats.accepted_tokens, stats.verified_tokens) == (5, 15, 15, 20)


def test_repeated_text_is_drafted_without_a_forward():
    made = engine(open_model(idle(*range(LAYERS))), FULL, 8)  # the next token depends on the last one alone
    made.decode([Request(PROMPTS[3], 200, exact=True)])
    assert made.stats.steps < 100
    assert made.planner.drafts(1) is None


def test_an_end_token_ends_a_sequence_in_the_middle_of_its_drafts():
    model = open_model(idle(4))
    want = tokens(FastEngine(model, FULL), requests(False))
    ends = frozenset({want[0][5], want[2][2]})
    plain = FastEngine(model, FULL).decode(requests(False, stop_ids=ends))
    made = engine(model, WITHOUT_IDLE, 5)
    assert made.decode(requests(True, stop_ids=ends)) == plain
    assert made.kv_bytes == 0


def test_cancelled_sequences_leave_and_others_go_on():
    model = open_model(tiny_model("llama"))
    want = tokens(FastEngine(model, FULL), requests(False))
    made = engine(model, DRAFTING["falling"])
    numbers = made.submit(requests(True))
    got = {number: [] for number in numbers}
    for step in range(100):
        if step == 3:
            made.cancel(numbers[1])
        for out in made.step():
            got[out.request].append(out.token)
    assert len(got.pop(numbers[1])) < len(want[1])
    assert list(got.values()) == [want[0], want[2], want[3]]
    assert made.kv_bytes == 0


def test_a_prefix_cache_and_second_turns_change_nothing():
    model = open_model(tiny_model("llama"))
    made = engine(model, DRAFTING["falling"], prefix_cache=True)
    (first,) = tokens(made, [Request(PROMPTS[2], 20, exact=True)])
    turn = (*PROMPTS[2], *first, 4, 5, 6)
    asked = [Request(turn, 20, exact=True), Request(turn[:50], 20, exact=True)]
    assert tokens(made, asked) == tokens(FastEngine(model, FULL), asked[:0] + [Request(r.prompt, 20) for r in asked])
    assert made.stats.prefix_hit_tokens


def test_exact_and_plain_sequences_share_a_batch():
    model, schedule = open_model(tiny_model("llama")), DRAFTING["falling"]
    exact, plain = (tokens(FastEngine(model, under), requests(False)) for under in (FULL, schedule))
    made = engine(model, schedule)
    mixed = [Request(r.prompt, r.max_new_tokens, r.sampling, exact=i % 2 == 0) for i, r in enumerate(requests(False))]
    assert tokens(made, mixed) == [exact[0], plain[1], exact[2], plain[3]]


@pytest.mark.parametrize("top_k", [0, 6])
def test_sampled_tokens_have_full_depths_distribution(top_k):
    model = open_model(tiny_model("llama", vocab_size=12))
    prompt, draws = (5, 6, 7), 1500
    asked = [Request(prompt, 3, Sampling(temperature=1.5, top_k=top_k, seed=i), exact=True) for i in range(draws)]
    made = engine(model, DRAFTING["constant"], 2, max_rows=64)
    rows = tokens(made, asked)
    assert 0 < made.stats.accepted_tokens < made.stats.drafted_tokens
    # The second token, after the first one that is most frequent: the first that was drafted.
    first = Counter(row[0] for row in rows).most_common(1)[0][0]
    seen = torch.bincount(torch.tensor([row[1] for row in rows if row[0] == first]), minlength=12).double()
    logits = one_logits(model, (*prompt, first)) / 1.5
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    want = logits.double().softmax(0) * seen.sum()
    assert not seen[want == 0].any()
    likely = want > 5
    chi_square = ((seen - want)[likely] ** 2 / want[likely]).sum()
    assert chi_square < 3 * int(likely.sum())  # of p < 0.001 with 4 or more degrees of freedom


def one_logits(model, text):
    with torch.no_grad():
        return model._model(torch.tensor([text])).logits[0, -1]


def test_nothing_is_drafted_where_it_does_not_pay():
    planner = Planner()
    for rows in range(1, 65):
        planner.checks.note(rows, 1.0 * rows)  # a token more costs what a token costs
    drafter = planner.drafter(DRAFTING["constant"], PROMPTS[0])
    drafter.look(NEW)
    planned = [planner.plan(1, [drafter]) for _ in range(252)]
    probes = [step for step, counts in enumerate(planned) if counts != [0]]
    assert probes == [3, 11, 27, 59, 123, 187, 251]  # once in a while one token, to learn of a change
    for _ in range(20):
        for rows in range(1, 65):
            planner.checks.note(rows, 0.1)  # reading the weights is all that takes time
            planner.drafts.note(rows, 0.01)
    assert planner.plan(1, [drafter])[0] > 1


def test_a_sequence_whose_drafts_fail_stops_drafting_and_others_go_on():
    planner = Planner()
    for rows in range(1, 65):
        planner.checks.note(rows, 1.0 + 0.05 * rows)
        planner.drafts.note(rows, 0.2)
    good, bad = (planner.drafter(DRAFTING["constant"], PROMPTS[0]) for _ in range(2))
    for drafter in (good, bad):
        drafter.look(NEW)
    assert min(planner.plan(2, [good, bad])) > 0
    for i in range(50, 90):
        good.learn((2 * i, i), (2 * i, i))
        bad.learn((2 * i, i), (i,))
        good.look(NEW), bad.look(NEW)
    most, none = planner.plan(2, [good, bad])
    assert most > 2 > 0 == none


def test_estimates_follow_what_is_seen():
    times = ForwardTimes()
    assert times(3) is None
    times.note(2, 4.0)
    assert times(2) == times(1) == 4.0
    assert times(4) >= 4.0 + 2 * 0.25 * 2.0  # careful beyond what is known
    times.note(8, 10.0)
    assert times(5) == 7.0
    common = Acceptance(0.7)
    for _ in range(50):
        common.of_sequence().note(0, 4)
    assert common.of_sequence().chance < 0.1


def test_engines_that_cannot_draft_refuse_by_name():
    model = tiny_model("llama")
    with pytest.raises(UsageError, match="exact decoding needs the fast engine, not 'transformers'"):
        GatedEngine(model, FULL).submit([Request((5,), 2, exact=True)])


def test_no_draft_follows_one_that_is_improbable():
    model, asked = open_model(tiny_model("llama")), requests(exact=True)
    plain = tokens(engine(model, FULL), requests(exact=False))
    drafted = {}
    for least in (-math.inf, 0.0):
        made = engine(model, DRAFTING["constant"])
        made.planner = Always(3, layers=True)
        made.planner.least_logprob = least
        assert tokens(made, asked) == plain
        drafted[least] = made.stats.drafted_tokens
    assert drafted[0.0] < drafted[-math.inf] / 2


@pytest.mark.parametrize("right", [False, True])
def test_drafts_come_from_the_source_that_gives_more_tokens_a_second(right):
    planner = Planner()
    for rows in range(1, 65):
        planner.checks.note(rows, 1.0)
    planner.drafts.note(1, 0.1)
    drafter = planner.drafter(DRAFTING["constant"], tuple(range(5, 17)) * 3)
    for i in range(20, 40):
        drafter.look(NEW)
        planner.plan(1, [drafter])
        assert drafter.found  # the text repeats
        drafter.learn(drafter.found if right else (i,), drafter.found if right else (i, *range(5, 17)))
    assert drafter.runs is not right
