"""The 8-bit copy of the head: its bounds hold, and the tokens are the full head's bit for bit, ties included."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_tools import FAST
from kernel_reference import kernels_or_skip
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request, Sampling
from skipdecode.engine.fast_model import open_model
from skipdecode.engine.kernels import head
from skipdecode.engine.kernels.head import MOST_CANDIDATES, MOST_ROWS, NativeHead, ShortHead
from skipdecode.engine.kernels.spec import LinearSpec
from skipdecode.engine.sampling import Predictions, Sampler
from skipdecode.models.loading.hub import load_model
from tiny import LAYERS, tiny_model

NEW = 20
PROMPTS = [(5, 6, 7, 8), (9,), tuple(range(3, 40)), (11, 12, 13, 14, 15, 16, 17)]
TYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _bytes_are_multiplied() -> None:
    if not kernels_or_skip().finds_likeliest:
        pytest.skip("this CPU has no AVX512_VNNI")


def head_of(weight, model_dtype=torch.bfloat16, **changes):
    """The full head's call and the 8-bit copy of a weight, behind the norm of `changes` (default: none)."""
    kernels, spec = kernels_or_skip(model_dtype), LinearSpec(weight, **changes)
    return kernels.linear(spec), ShortHead(kernels, spec)


def compare(full, short, x, tops):
    """What both say of states: every row that the copy decides has the full head's words; True if it decided all."""
    rows = len(x)
    logits = torch.empty(rows, short._full.n)
    full(x, logits, rows, False)
    decided = 0
    for i in range(rows):  # one by one too, since a row that it leaves takes the others with it
        found = short(x[i : i + 1], tops[i : i + 1])
        if found is None:
            continue
        decided += 1
        assert found.best == [int(logits[i].argmax())]
        token_ids = found.token_ids[0, : found.counts[0]]
        assert torch.equal(token_ids, token_ids.sort().values)
        assert torch.equal(found.logits[0, : found.counts[0]], logits[i, token_ids])
        order = torch.sort(logits[i], descending=True, stable=True).indices[: tops[i]]
        assert set(order.tolist()) <= set(token_ids.tolist())
    together = short(x, tops)
    assert (together is not None) == (decided == rows)
    if together is not None:
        assert together.best == logits.argmax(-1).tolist()
    return together is not None


def near_ties(words, columns, kind, seed):
    """A weight with rows that are hard to tell apart, and states."""
    torch.manual_seed(seed)
    weight = torch.randn(words, columns) * 10 ** float(torch.randint(-3, 2, ()))
    weight = weight.bfloat16()
    x = torch.randn(6, columns)
    few = torch.randint(words, (min(words, 5),))
    if kind == "duplicates":
        weight[few] = weight[few[0]].clone()
    elif kind == "one ulp":
        # Copies of one row that differ by a last bit in one place each.
        weight[few] = weight[few[0]].clone()
        bits = weight.view(torch.int16)
        bits[few, torch.randint(columns, (len(few),))] ^= 1
    elif kind == "aligned":
        # States along the quantisation errors of rows, where the norm bound is met.
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        error = weight.float() - torch.round(weight.float() / scale) * scale
        x = error[torch.randint(words, (6,))] * 1000
    elif kind == "outliers":
        x[:, torch.randint(columns, (1 + columns // 16,))] *= 10 ** float(torch.randint(1, 6, ()))
        weight[:, 0] *= 50
    elif kind == "zeros":
        x[::2] = 0
        weight[few] = 0
    elif kind == "huge":
        x *= torch.tensor([1e18, 1e19, 1e25, 3e38, 1e-38, 1e-44])[:, None]
    elif kind == "subnormal":
        weight = (weight.float() * 1e-39).bfloat16()
    elif kind == "not finite":
        x[0, 0], x[1, -1], x[2] = torch.inf, torch.nan, -torch.inf
    # Best rows point along their states, so that there is something to decide.
    if kind in ("duplicates", "one ulp", "outliers"):
        x = x + 2 * weight[few[0]].float() / weight[few[0]].float().norm() * columns**0.5
    return weight, x


KINDS = ["plain", "duplicates", "one ulp", "aligned", "outliers", "zeros", "huge", "subnormal", "not finite"]


@settings(max_examples=60, deadline=None)
@given(
    words=st.integers(1, 1100),
    columns=st.integers(1, 200),
    kind=st.sampled_from(KINDS),
    top=st.integers(1, 20),
    dtype=st.sampled_from(TYPES),
    rounds=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_words_are_the_full_heads_on_any_input(words, columns, kind, top, dtype, rounds, seed):
    weight, x = near_ties(words, columns, kind, seed)
    full, short = head_of(weight.to(dtype), torch.bfloat16 if rounds else torch.float32)
    assert short.bounded
    compare(full, short, x, [min(words, 1 + (top + i) % 20) for i in range(len(x))])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("bias", [False, True])
def test_norm_and_bias_of_the_head_are_those_of_the_full_one(norm, bias, dtype):
    torch.manual_seed(3)
    weight, gamma = torch.randn(2000, 96).to(dtype), torch.rand(96) + 0.5
    beta = torch.randn(96) if norm == "layer_norm" else None
    full, short = head_of(
        weight, dtype, bias=torch.randn(2000) * 5 if bias else None, prologue=norm, gamma=gamma, beta=beta, eps=1e-5
    )
    assert compare(full, short, torch.randn(MOST_ROWS, 96) * 7, [1] * MOST_ROWS)


def test_it_decides_where_there_is_a_likeliest_word_and_leaves_the_rest():
    weight, x = near_ties(5000, 64, "plain", 0)
    full, short = head_of(weight)
    assert compare(full, short, x, [1] * 6)
    assert not compare(full, short, torch.zeros(1, 64), [1])  # all equal
    assert not compare(full, short, torch.full((1, 64), math.nan), [1])
    assert not compare(full, short, x, [MOST_CANDIDATES + 1] * 6)


def test_weights_that_are_not_finite_are_the_full_heads():
    for value in (math.nan, math.inf, 1e30):
        weight = torch.randn(300, 64)
        weight[7, 7] = value
        assert not head_of(weight)[1].bounded


# ---------------------------------------------------------------------- decoding


def rows_of(model, schedule, requests, short_from, monkeypatch, **options):
    monkeypatch.setattr(NativeHead, "short_from", short_from)
    engine = FastEngine(open_model(model), schedule, **options)
    return [row.tokens for row in engine.decode(requests)], engine.stats


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", FAST)
def test_decoding_is_that_of_the_full_head(family, dtype, monkeypatch):
    model, schedule = tiny_model(family, vocab_size=3001).to(dtype), Schedule.from_speedup(LAYERS, 2, NEW)
    kinds = [Sampling(), Sampling(temperature=1.1, top_k=7, top_p=0.9, seed=3)]
    requests = [Request(p, NEW, kinds[i % 2], exact=False) for i, p in enumerate(PROMPTS)]
    want, full = rows_of(model, schedule, requests, math.inf, monkeypatch)
    got, stats = rows_of(model, schedule, requests, 0, monkeypatch)
    assert got == want
    assert full.short_heads == full.head_fallbacks == 0
    if family == "gemma2":  # its capped logits are those of the full head
        assert stats.short_heads == 0
        return
    assert stats.short_heads > NEW / 2
    assert stats.short_heads + stats.head_fallbacks == stats.steps + 1


def test_what_needs_all_logits_has_them(monkeypatch):
    model, schedule = tiny_model("llama", vocab_size=3001), Schedule.full(LAYERS)
    whole = [
        Sampling(top_logprobs=0),
        Sampling(top_logprobs=2),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.0, top_k=1000, seed=1),
        Sampling(repetition_penalty=0.8),
        Sampling(logit_bias={3: 1.0}),
    ]
    for sampling in whole:
        requests = [Request(PROMPTS[0], 4), Request(PROMPTS[1], 4, sampling)]
        monkeypatch.setattr(NativeHead, "short_from", 0)
        engine = FastEngine(open_model(model), schedule)
        outputs = list(engine.run(requests))
        assert engine.stats.short_heads == 0
        assert all(math.isfinite(out.logprob) for out in outputs)
    assert all(math.isnan(out.logprob) for out in FastEngine(open_model(model), schedule).run([Request((5,), 4)]))


def test_a_head_that_is_changed_in_place_is_the_changed_one(monkeypatch):
    model = tiny_model("llama", vocab_size=3001)
    fast, texts = open_model(model), []
    for short_from in (0, 0, math.inf):
        monkeypatch.setattr(NativeHead, "short_from", short_from)
        engine = FastEngine(fast, Schedule.full(LAYERS))
        texts.append([row.tokens for row in engine.decode([Request(p, NEW) for p in PROMPTS])])
        assert bool(engine.stats.short_heads) == (short_from == 0)
        if len(texts) == 1:
            with torch.no_grad():
                model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert texts[0] != texts[1] == texts[2]


def test_candidates_are_drawn_from_as_all_words_are():
    torch.manual_seed(0)
    weight, x = near_ties(5000, 64, "duplicates", 1)
    full, short = head_of(weight)
    logits = torch.empty(len(x), 5000)
    full(x, logits, len(x), False)
    settings = [Sampling(temperature=1.5, top_k=1 + 5 * i, min_p=0.01, seed=i) for i in range(len(x))]
    found = short(x, [s.top_k for s in settings])
    rows = [[Sampler(s, ()) for s in settings] for _ in range(2)]
    for _ in range(10):
        for i, (short, full) in enumerate(zip(*rows, strict=True)):
            assert Predictions(found).token(i, short).token == Predictions(logits).token(i, full).token


def test_small_heads_quantised_ones_and_many_rows_take_the_full_one(monkeypatch):
    model = tiny_model("llama", vocab_size=3001)
    requests = [Request((5 + i,), 2) for i in range(MOST_ROWS + 1)]
    for options, short_from in (({"max_rows": MOST_ROWS + 1}, 0), ({}, 2**23)):
        _, stats = rows_of(model, Schedule.full(LAYERS), requests, short_from, monkeypatch, **options)
        assert stats.short_heads == 0
    monkeypatch.setattr(NativeHead, "short_from", 0)
    engine = FastEngine(open_model(model, quantization="int8"), Schedule.full(LAYERS))
    engine.decode(requests)
    assert engine.stats.short_heads == engine.stats.head_fallbacks == 0
    assert head.MOST_CANDIDATES < 3001


@pytest.mark.model
@pytest.mark.parametrize("rows", [1, 4])
def test_smollm2_says_the_same(rows, monkeypatch):
    loaded = load_model("e2e-smollm2-135m", dtype="bfloat16")
    meanings = [
        f"name[{name}], eatType[pub], food[{food}], area[riverside]"
        for name in ("Aromi", "Zizzi")
        for food in ("French", "Fast food")
    ]
    requests = [Request(tuple(loaded.tokenizer(text).input_ids), 24, exact=False) for text in meanings]
    model = loaded.model.merge_and_unload()
    for schedule in (Schedule.full(30), loaded.checkpoint.schedule.with_speedup(5)):
        want, _ = rows_of(model, schedule, requests, math.inf, monkeypatch, max_rows=rows)
        got, stats = rows_of(model, schedule, requests, 2**23, monkeypatch, max_rows=rows)
        assert got == want
        assert stats.short_heads > 20 * (stats.head_fallbacks + 1)
