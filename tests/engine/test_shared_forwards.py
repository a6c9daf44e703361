"""Forwards that prompts with layers of their own share with rows that decode; batches of the transformers engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_tools import Always, check_greedy, decode, outputs_of
from fits import random_fit
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule
from skipdecode.engine import FastEngine, GatedEngine, Request, Sampling, StepOutput
from skipdecode.engine.rows import Chunk, token_rows
from skipdecode.engine.sequence import Sequence
from skipdecode.models.fit import set_fit
from tiny import LAYERS, tiny_model

NEW = 10
LOWER = (0, 1, 2)
SPLIT = Schedule.split(LAYERS, len(LOWER), [5, 5, 4, 3])
# Generated tokens of FLAT run a layer that SPLIT's prompts do not hold, and these hold one that FLAT skips.
FLAT = Schedule.constant(LAYERS, 6, prompt="max_exit")
SCHEDULES = [SPLIT, FLAT, Schedule.full(LAYERS)]


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def outputs(engine: FastEngine, steps: list[tuple[Request, Schedule]]) -> list[list[StepOutput]]:
    """The outputs of requests, of which one is submitted before each step."""
    found: list[list[StepOutput]] = [[] for _ in steps]
    waiting = list(steps)
    while waiting or engine.has_work:
        if waiting:
            request, schedule = waiting.pop(0)
            engine.submit([request], schedule)
        for out in engine.step():
            found[out.request].append(out)
    return found


@pytest.mark.parametrize("chunk", [8, 512])
def test_every_stream_gets_a_token_in_each_forward_while_a_long_split_prompt_enters(chunk: int):
    model, long = tiny_model("llama"), Request(prompt_of(100, 3), 3)
    streams = [Request(prompt_of(5, 1), 30), Request(prompt_of(9, 2), 30)]
    engine = FastEngine(model, SPLIT, refill_below=1, in_order=True, prompt_tokens=chunk)
    engine.submit(streams)
    tokens: list[list[int]] = [[], [], []]
    while not all(tokens[:2]):
        for out in engine.step():
            tokens[out.request].append(out.token)
    engine.submit([long])
    forwards = 0
    while not tokens[2]:
        came = engine.step()
        assert {out.request for out in came} >= {0, 1}
        forwards += 1
        for out in came:
            tokens[out.request].append(out.token)
    assert forwards == -(-100 // chunk)
    for out in engine.run([]):
        tokens[out.request].append(out.token)
    for request, row in zip([*streams, long], tokens, strict=True):
        assert row == FastEngine(model, SPLIT).decode([request])[0].tokens


@pytest.mark.parametrize("taps", [None, 0, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_mixed_forwards_equal_the_oracle_and_each_sequence_alone_bit_for_bit(taps: int | None, prefix_cache: bool):
    """Split prompts and others, rows of all ages and depths, and drafts; a few prompt tokens in each forward."""
    model = tiny_model("llama")
    fit = None if taps is None else random_fit(model, [LOWER], taps=taps)
    set_fit(model, fit)
    steps = [
        (Request(prompt_of(2 + 7 * i % 40, i % 9), NEW, exact=i % 4 == 1), SCHEDULES[i * 2 // 3 % 3]) for i in range(18)
    ]
    options = {"refill_below": 1, "in_order": True, "prompt_tokens": 5, "prefix_cache": prefix_cache}
    engine = FastEngine(model, SPLIT, max_rows=6, **options)
    engine.planner = Always(2)
    found = outputs(engine, steps)
    assert engine.stats.drafted_tokens > 0
    for (request, schedule), row in zip(steps, found, strict=True):
        (alone,) = outputs(FastEngine(model, SPLIT, max_rows=1), [(request, schedule)])
        assert [(o.token, o.logprob) for o in row] == [(o.token, o.logprob) for o in alone]
        check_greedy(model, schedule, request.prompt, row, fit)


@pytest.mark.parametrize("kind", [FastEngine, GatedEngine])
@pytest.mark.parametrize("taps", [None, 2])
def test_prompts_are_scored_as_their_tokens_run(kind: type, taps: int | None):
    """Beside others that are not scored, in parts, and with a prefix cache that has them already."""
    model = tiny_model("llama")
    fit = None if taps is None else random_fit(model, [LOWER], taps=taps)
    set_fit(model, fit)
    options = {"refill_below": 1, "prompt_tokens": 7, "prefix_cache": True} if kind is FastEngine else {}
    engine = kind(model, SPLIT, max_rows=6, in_order=True, **options)
    lengths = [1, 2, 30, 18, 3, 25, 30, 9, 40]
    cases = [
        (Request(prompt_of(n, n), 2, Sampling(top_logprobs=2), scores_prompt=i % 3 != 1), SCHEDULES[i % 3 - 1])
        for i, n in enumerate(lengths * 2)
    ]
    for request, schedule in cases:
        engine.submit([request], schedule)
    found = [out for out in engine.run([]) if not out.position]
    assert [bool(out.prompt) for out in sorted(found)] == [r.scores_prompt and len(r.prompt) > 1 for r, _ in cases]
    for out in found:
        request, schedule = cases[out.request]
        text = torch.tensor([request.prompt])
        length = text.shape[1]
        with torch.no_grad():
            active = active_tokens(schedule, length, length)
            known = oracle_logits(model, text, torch.ones_like(text), active, fit, schedule, length)[0].log_softmax(-1)
        for place, (token, logprob, top) in enumerate(out.prompt, 1):
            assert token == request.prompt[place]
            assert logprob == pytest.approx(float(known[place - 1, token]), abs=1e-4)
            assert [value for _, value in top] == pytest.approx(known[place - 1].topk(2).values.tolist(), abs=1e-4)
        assert not out.prompt or len(out.prompt) == length - 1


@settings(max_examples=200, deadline=None)
@given(data=st.data(), own=st.booleans(), taps=st.integers(0, 2))
def test_each_row_runs_stores_or_skips_a_layer_as_its_schedule_says(data: st.DataObject, own: bool, taps: int):
    """Against the sets of each token; the rows of a layer must be neighbours."""
    chunks, expected = [], {}
    prompts = [SPLIT] if own else [s for s in SCHEDULES if s is not SPLIT]
    kinds = data.draw(st.lists(st.sampled_from(["decode", "prompt"]), min_size=1, max_size=7))
    for slot, kind in enumerate(kinds):
        schedule = data.draw(st.sampled_from(SCHEDULES if kind == "decode" else prompts))
        length = data.draw(st.integers(1, 9))
        sequence = Sequence(slot, Request((1,) * length, 9), schedule)
        sequence.slot, sequence.sampler = slot, SimpleNamespace(top=1)  # type: ignore[assignment]
        held = {*schedule.prompt_layers()} | {*schedule.projected}
        if kind == "decode":
            drafts = data.draw(st.integers(0, 2))
            sequence.output, sequence.ran = [1], length
            sequence.layers = schedule.layers(data.draw(st.integers(0, 5)))
            expected |= {(slot, length + i): ({*sequence.layers}, {*sequence.layers}, True) for i in range(drafts + 1)}
            chunks.append(Chunk.following(sequence, (1,) * (drafts + 1)))
            continue
        start = sequence.ran = data.draw(st.integers(0, length - 1))
        end = data.draw(st.integers(start + 1, length))
        run = {*schedule.prompt_layers()} - {max(held)}
        if own and start < min(end, length - 1):
            expected |= {(slot, at): (run, run, False) for at in range(max(0, start - taps), start)}
        expected |= {(slot, at): (run, held, False) for at in range(start, end)}
        if end == length:
            expected[slot, end - 1] = held, held, True
        chunks.append(Chunk.following(sequence, (1,) * (end - start)))
    rows, due = token_rows(chunks, LAYERS, taps)
    places = list(zip(rows.slots, rows.positions, strict=True))
    assert sorted(places) == sorted(expected)
    wanted = [place for place in places if expected[place][2]]
    assert wanted == places[len(places) - rows.num_logits :]
    assert [span.sequence.slot for span in due] == list(dict.fromkeys(slot for slot, _ in wanted))
    for layer, (stored, runs, end) in enumerate(rows.layers):
        assert places[runs:end] == [place for place in places if layer in expected[place][0]]
        assert places[stored:end] == [place for place in places if layer in expected[place][1]]
    if any(chunk.sequence.in_prefill and own for chunk in chunks):
        assert rows.bridged == len(places) - rows.num_logits
        if taps:
            known = dict(zip(places, range(len(places)), strict=True))
            assert rows.context_rows == [[known.get((s, at - t), -1) for t in range(1, taps + 1)] for s, at in places]
    else:
        assert rows.bridged == 0


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
    engine.submit([Request(tuple(p), 10) for p in PROMPTS[:2]])
    engine.submit([Request(tuple(p), 10) for p in PROMPTS[2:]], FULL)
    pairs = ((PAPER, PROMPTS[:2]), (FULL, PROMPTS[2:]))
    wanted = [row for schedule, prompts in pairs for row in decode(GatedEngine(model, schedule), prompts, 10)[0]]
    assert [[out.token for out in row] for row in outputs_of(engine)] == wanted
