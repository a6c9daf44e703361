"""Drafts change nothing: the tokens are those without them, under every schedule, however many, and beside whom."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from engine_tools import Always, outputs_of, tokens_of
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request, Sampling
from skipdecode.engine.drafts import Acceptance, ForwardTimes, Planner, TextIndex
from skipdecode.engine.fast_model import open_model
from tiny import LAYERS, tiny_model

NEW = 24
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 11, 12, 13, 14, 11, 12, 13)]
FULL = Schedule.full(LAYERS)
SCHEDULES = {
    "full": FULL,
    "constant": Schedule.even(LAYERS, 4),
    "falling": Schedule.from_speedup(LAYERS, 2, NEW),
    "split": Schedule.split(LAYERS, 4, [5, 5, 4, 3]),
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


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_without_drafts_in_ragged_batches(name, dtype):
    model, schedule = open_model(tiny_model("llama").to(dtype)), SCHEDULES[name]
    want = tokens_of(FastEngine(model, schedule), requests(False))
    for count in (1, 3, 8):
        made = engine(model, schedule, count, max_rows=3, refill_below=1, in_order=True, prompt_tokens=9)
        for _ in range(2):  # with earlier answers the second time
            assert tokens_of(made, requests(True)) == want
        assert made.stats.accepted_tokens > 0
        assert made.kv_bytes == 0


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "opt"])
def test_tokens_are_those_without_drafts_with_8_bit_weights(family):
    model = open_model(tiny_model(family), "int8")
    want = tokens_of(FastEngine(model, SCHEDULES["falling"]), requests(False))
    assert tokens_of(engine(model, SCHEDULES["falling"]), requests(True)) == want


def test_rejected_drafts_leave_the_inputs_of_short_convolutions():
    model, schedule = open_model(tiny_model("lfm2", num_key_value_heads=1)), SCHEDULES["falling"]
    assert model.most_drafts == 6  # A page holds the inputs of 8 tokens.
    want = tokens_of(FastEngine(model, schedule), requests(False))
    made = engine(model, schedule, 8, max_rows=3, refill_below=1, in_order=True, prompt_tokens=9)
    assert tokens_of(made, requests(True)) == want
    assert made.stats.drafted_tokens > made.stats.accepted_tokens > 0


def test_log_probabilities_the_likeliest_and_layers_are_those_without_drafts():
    model, schedule = open_model(tiny_model("llama")), SCHEDULES["falling"]
    made = engine(model, schedule)
    made.decode(requests(True)[3:])
    (plain,), (drafted,) = (
        outputs_of(each, requests(each is made)[3:]) for each in (FastEngine(model, schedule), made)
    )
    assert made.stats.accepted_tokens
    assert [(o.token, o.logprob, o.top, o.position, o.layers) for o in drafted] == [
        (o.token, o.logprob, o.top, o.position, o.layers) for o in plain
    ]


def test_an_earlier_answer_is_drafted_whole_for_the_same_salt_alone():
    made = engine(open_model(tiny_model("llama")), FULL)
    steps = []
    for salt in ("mine", "mine", "another"):
        before = made.stats.steps
        made.decode([Request(PROMPTS[0], 21, cache_salt=salt)])
        steps.append(made.stats.steps - before)
    assert steps[1] == 5  # 20 tokens, 3 of 4 drafted
    assert steps[2] == steps[0] > 15


def idle():
    """A model whose layers do nothing: the next token depends on the last one alone, so texts repeat."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.zero_()
    return model


def test_repeated_text_is_drafted():
    made = engine(open_model(idle()), FULL, 8)
    made.decode([Request(PROMPTS[3], 200)])
    assert made.stats.steps < 100


def test_an_end_token_ends_a_sequence_in_the_middle_of_its_drafts():
    model = open_model(tiny_model("llama"))
    made = engine(model, FULL, 5)
    want = tokens_of(made, requests(True))
    ends = frozenset({want[0][5], want[2][2]})
    plain = FastEngine(model, FULL).decode(requests(False, stop_ids=ends))
    assert made.decode(requests(True, stop_ids=ends)) == plain
    assert made.kv_bytes == 0


def test_cancelled_sequences_leave_and_others_go_on():
    model = open_model(tiny_model("llama"))
    made = engine(model, FULL)
    want = tokens_of(made, requests(True))
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
    model, schedule = open_model(tiny_model("llama")), SCHEDULES["falling"]
    made = engine(model, schedule, prefix_cache=True)
    (first,) = tokens_of(made, [Request(PROMPTS[2], 20)])
    turn = (*PROMPTS[2], *first, 4, 5, 6)
    asked = [Request(turn, 20), Request(turn[:50], 20)]
    plain = [Request(r.prompt, 20, exact=False) for r in asked]
    assert tokens_of(made, asked) == tokens_of(FastEngine(model, schedule), plain)
    assert made.stats.prefix_hit_tokens


@pytest.mark.parametrize("top_k", [0, 6])
def test_sampled_tokens_have_the_models_distribution(top_k):
    model = open_model(tiny_model("llama", vocab_size=12))
    prompt, draws = (5, 6, 7), 1500
    asked = [Request(prompt, 3, Sampling(temperature=1.5, top_k=top_k, seed=i)) for i in range(draws)]
    made = engine(model, FULL, 2, max_rows=64)
    rows = tokens_of(made, asked)
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


def planner_of(seconds):
    """A planner that has measured forwards of up to 64 rows."""
    planner = Planner()
    for rows in range(1, 65):
        planner.forwards[LAYERS].note(rows, seconds(rows))
    return planner


REPEATED = tuple(range(5, 17)) * 3


def test_nothing_is_drafted_where_it_does_not_pay():
    planner = planner_of(lambda rows: rows)  # a token more costs what a token costs
    drafter = planner.drafter(REPEATED)
    drafter.find(NEW)
    probes = [step for step in range(252) if planner.plan(1, LAYERS, [drafter])]
    assert probes == [3, 11, 27, 59, 123, 187, 251]  # once in a while one token, to learn of a change
    for rows in range(1, 65):
        planner.forwards[LAYERS].note(rows, 0.1)  # reading the weights is all that takes time
    assert planner.plan(1, LAYERS, [drafter])[drafter] > 1


def test_a_sequence_whose_drafts_fail_stops_drafting_and_others_go_on():
    planner = planner_of(lambda rows: 1 + 0.05 * rows)
    good, bad = (planner.drafter(REPEATED) for _ in range(2))
    for i in range(60):
        for drafter in (good, bad):
            drafter.find(NEW)
        good.learn(good.drafts or (5 + i % 12,))
        bad.learn((100 + i, 15, 16))
    for drafter in (good, bad):
        drafter.find(NEW)
    assert good.drafts
    assert bad.drafts
    counts = planner.plan(2, LAYERS, [good, bad])
    assert set(counts) == {good}
    assert counts[good] > 2


def test_one_sequence_that_copies_drafts_beside_seven_that_do_not():
    planner = planner_of(lambda rows: 25 + 1.2 * rows)  # milliseconds of a step of a 0.5B model
    drafters = [planner.drafter(REPEATED), *(planner.drafter((1, 2, 3, 4)) for _ in range(7))]
    for drafter in drafters:
        drafter.find(NEW)
    assert planner.plan(8, LAYERS, drafters)[drafters[0]] > 1


def test_the_longest_match_is_found():
    torch.manual_seed(3)
    text = torch.randint(0, 4, (300,)).tolist()
    index = TextIndex()
    for end, token in enumerate(text):
        same, place = index.longest(text[:end])
        places = [p for p in range(1, end) if text[p - 1] == text[end - 1]]
        pairs = [p for p in places if p > 1 and end > 1 and text[p - 2] == text[end - 2]]
        lengths = {
            p: next(n for n in range(1, 17) if n == min(p, 16) or text[p - n - 1] != text[end - n - 1])
            for p in (pairs or places)[-8:]
        }
        best = max(lengths.items(), key=lambda pair: (pair[1], pair[0]), default=(0, 0))
        assert (place, same) == best
        index.extend([token])


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
        Acceptance(common=common).note(0, 4)
    assert Acceptance(common=common).chance < 0.1
