"""Prompts that begin alike share pages: the same tokens come out, less is run, and no page is lost or written over."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_tools import check_greedy, outputs_of
from kernel_reference import kernels_or_skip
from products import in_turn
from serve_tools import running, tiny_service
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request, Sampling
from skipdecode.engine.kv import PagedKV
from skipdecode.engine.sequence import Sequence
from skipdecode.schedule.order import top_down
from skipdecode.serving.middleware import ApiKeys
from tiny import LAYERS, tiny_model

NEW = 10
PAGE = 16
SYSTEM = tuple(3 + 7 * i % 90 for i in range(40))
PROMPTS = [
    (*SYSTEM, 5, 6),
    (*SYSTEM, 7, 8, 9, 10, 11, 12, 13, 14),  # three whole pages: the last is not looked up, its last token must run
    SYSTEM[:PAGE],
    (*SYSTEM, 5, 6, 90, 91, 92, 93, 94, 95, 96),
    SYSTEM[:33],
    (9, *SYSTEM),  # the same tokens one place further are others
    (*SYSTEM, 5, 6),
]
DECAY = Schedule.from_speedup(LAYERS, 2, NEW)
PAPER = Schedule.paper(LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=8)
SCHEDULES = {
    "full": Schedule.full(LAYERS),
    "decay": DECAY,
    "paper": PAPER,
    "flat": Schedule.constant(LAYERS, 4),
    "top-down": Schedule(LAYERS, top_down(LAYERS, 1), (6, 4, 3)),
}


@pytest.fixture(autouse=True)
def _pages() -> None:
    kernels_or_skip()


def requests_of(prompts: Any = PROMPTS, new: int = NEW) -> list[Request]:
    """Greedy, sampled and penalised rows in turn."""
    kinds = (Sampling(), Sampling(temperature=0.9, top_k=30, seed=4), Sampling(presence_penalty=0.5))
    return [Request(p, new + i % 3, kinds[i % 3]) for i, p in enumerate(prompts)]


def rows_of(engine: FastEngine, requests: list[Request]) -> list[list[tuple[int, int]]]:
    """(token, layers) of each row."""
    return [[(out.token, out.layers) for out in row] for row in outputs_of(engine, requests)]


def all_pages_are_free(kv: PagedKV) -> bool:
    """Of an engine without rows: once nothing is kept, every page is free, once."""
    assert kv.bytes_held == 0 == kv.prefixes.overlap
    while kv.prefixes.idle:
        kv._free.extend(kv.prefixes.evict())
    assert kv.cached_bytes == 0
    return sorted(kv._free) == list(range(len(kv.pages)))


OPTIONS = {"together": {"max_rows": 7}, "in-order": {"max_rows": 2, "refill_below": 1, "in_order": True}}


@pytest.mark.parametrize(("name", "prompt", "kind"), in_turn(SCHEDULES, ["full", "max_exit", (0, 1, 2, 5)], OPTIONS))
def test_rows_are_those_without_a_cache(name: str, prompt: Any, kind: str):
    model, schedule, options = tiny_model("llama"), replace(SCHEDULES[name], prompt=prompt), OPTIONS[kind]
    requests = requests_of()
    want = outputs_of(FastEngine(model, schedule, **options), requests)
    engine = FastEngine(model, schedule, prefix_cache=True, prompt_tokens=50, **options)
    for _ in range(2):
        for found, expected in zip(outputs_of(engine, requests), want, strict=True):
            assert [(out.token, out.layers) for out in found] == [(out.token, out.layers) for out in expected]
            assert [out.logprob for out in found] == pytest.approx([out.logprob for out in expected], abs=1e-5)
    tokens = sum(len(r.prompt) for r in requests)
    assert engine.stats.prompt_tokens + engine.stats.prefix_hit_tokens == 2 * tokens
    # The second time only what is behind the last page that could be found.
    rest = sum((len(r.prompt) - 1) % PAGE + 1 for r in requests)
    assert engine.stats.prompt_tokens < tokens + rest
    assert all_pages_are_free(engine.kv)


@pytest.mark.parametrize("family", ["llama", "opt", "mistral", "qwen3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("prompt", ["full", "max_exit", (0, 1, 2, 5)], ids=str)
def test_a_row_on_kept_pages_is_the_oracles(family: str, prompt: Any):
    model, schedule = tiny_model(family), replace(PAPER, prompt=prompt)
    engine = FastEngine(model, schedule, prefix_cache=True)
    requests = [Request(p, NEW) for p in PROMPTS]
    engine.decode(requests)
    before = engine.stats.prefix_hit_tokens
    rows = outputs_of(engine, requests)
    assert engine.stats.prefix_hit_tokens - before == sum((len(p) - 1) // PAGE * PAGE for p in PROMPTS)
    for prompt_ids, row in zip(PROMPTS, rows, strict=True):
        check_greedy(model, schedule, prompt_ids, row)


def test_prompts_share_only_what_ran_the_same_layers():
    model, deep, shallow = tiny_model("llama"), PAPER, replace(PAPER, prompt="max_exit")
    engine = FastEngine(model, Schedule.constant(LAYERS, LAYERS), prefix_cache=True, max_rows=4, refill_below=1)
    hits = []
    for schedule in (deep, shallow, deep, shallow, DECAY):
        before = engine.stats.prefix_hit_tokens
        engine.submit([Request(PROMPTS[0], NEW)], schedule)
        alone = FastEngine(model, schedule).decode([Request(PROMPTS[0], NEW)])
        assert [out.token for out in engine.run([])] == alone[0].tokens
        hits.append(engine.stats.prefix_hit_tokens - before)
    assert hits == [0, 0, 32, 32, 32]


def test_like_prompts_that_come_together_run_their_beginning_once():
    model, prompts = tiny_model("llama"), [(*SYSTEM, i) for i in range(5, 11)]
    engine = FastEngine(model, DECAY, prefix_cache=True, max_rows=6)
    requests = [Request(p, 3) for p in prompts]
    assert rows_of(engine, requests) == rows_of(FastEngine(model, DECAY, max_rows=6), requests)
    assert engine.stats.prompt_tokens == 41 + 5 * (41 - 32)
    assert engine.stats.prefix_hit_tokens == 5 * 32


def test_what_is_kept_is_no_rows_and_shared_pages_count_once():
    model, full = tiny_model("llama"), Schedule.full(LAYERS)
    engine = FastEngine(model, full, prefix_cache=True, max_rows=2, refill_below=1)
    page = engine.kv.layout.page_bytes
    engine.submit([Request(PROMPTS[0], 4), Request(PROMPTS[3], 4)])
    engine.step()
    engine.step()
    # 42 and 49 tokens: two pages together, then one and two of their own.
    assert engine.kv_bytes == (2 + 1 + 2) * LAYERS * page
    assert engine.cached_bytes == 0
    list(engine.run([]))
    assert engine.kv_bytes == 0
    assert engine.cached_bytes == (2 + 1) * LAYERS * page  # the third page of the longer one is full, too
    assert engine.stats.kv_bytes_peak == engine.stats.kv_bytes_full_peak > 0
    # A row that leaves layers leaves them to the cache, and saves as much as without one.
    runs = [FastEngine(model, DECAY, prefix_cache=cached) for cached in (True, False)]
    for run in runs:
        run.decode([Request(PROMPTS[0], NEW, exact=False)])
    assert runs[0].stats == replace(
        runs[1].stats, **{n: getattr(runs[0].stats, n) for n in vars(runs[0].stats) if "seconds" in n}
    )


@pytest.mark.parametrize("schedule", [PAPER, replace(DECAY, prompt="max_exit")], ids=["paper", "decay"])
def test_what_is_kept_beyond_the_limit_is_dropped_and_no_output_changes(schedule: Schedule):
    model, rng = tiny_model("llama"), random.Random(3)
    systems = [tuple(rng.randrange(3, 100) for _ in range(48)) for _ in range(4)]
    prompts = [(*rng.choice(systems)[: rng.choice((16, 32, 48))], *(rng.randrange(3, 100),) * 5) for _ in range(30)]
    requests = [Request(p, rng.randint(1, 25)) for p in prompts]
    want = rows_of(FastEngine(model, schedule), requests)
    for most in (LAYERS, 3 * LAYERS, 9 * LAYERS):
        engine = FastEngine(model, schedule, prefix_cache=True, max_rows=5, refill_below=1, prompt_tokens=40)
        engine.kv.prefixes.max_idle = most
        got: list[list[tuple[int, int]]] = [[] for _ in requests]
        cancelled = set()
        for out in engine.run(requests):
            got[out.request].append((out.token, out.layers))
            assert engine.cached_bytes <= most * engine.kv.layout.page_bytes
            assert engine.kv_bytes + engine.cached_bytes <= len(engine.kv.pages) * engine.kv.layout.page_bytes
            if out.request % 7 == 3 and out.position == 2 and out.finish_reason is None:
                engine.cancel(out.request)
                cancelled.add(out.request)
        assert cancelled
        assert all(row == full[: len(row)] for row, full in zip(got, want, strict=True))
        assert all(len(row) == len(full) or i in cancelled for i, (row, full) in enumerate(zip(got, want, strict=True)))
        assert engine.stats.prefix_hit_tokens > 0
        assert all_pages_are_free(engine.kv)


def test_rows_dropped_in_the_midst_of_their_prompts_lose_no_page():
    model = tiny_model("llama")
    options = {"max_rows": 4, "refill_below": 1, "in_order": True, "prompt_tokens": 20}
    engine = FastEngine(model, PAPER, prefix_cache=True, **options)
    numbers = engine.submit([Request(p, NEW) for p in PROMPTS[:4]])
    engine.step()
    engine.cancel(numbers[0])  # 20 of its 42 tokens have run: one page is kept
    assert engine.cached_bytes == LAYERS * engine.kv.layout.page_bytes
    for _ in range(4):
        engine.step()
    assert engine.stats.prefix_hit_tokens > 0
    engine.close()
    assert not engine.has_work
    assert rows_of(engine, requests_of()) == rows_of(FastEngine(model, PAPER), requests_of())
    assert all_pages_are_free(engine.kv)


def test_layers_that_only_the_prompt_ran_give_their_pages_to_the_answer():
    schedule = Schedule.split(LAYERS, 5, 4)
    rows = [Request(SYSTEM[:22], 30)]
    with_cache, without = (
        FastEngine(tiny_model("llama"), schedule, max_rows=1, prefix_cache=on) for on in (True, False)
    )
    assert rows_of(with_cache, rows) == rows_of(without, rows)


def test_least_recently_used_prompts_go_first_and_from_their_ends():
    kv = PagedKV(2, 1, 4, torch.float32, 4, prefix_bytes=10 * 128)  # five blocks of two layers
    kv.reserve(4, 64, 64)
    prompts = [(1,) * 13, (2,) * 9, (3,) * 5]  # three, two and one full pages of 4

    def run(prompt: tuple[int, ...]) -> int:
        sequence = Sequence(0, Request(prompt, 1), Schedule.full(2))
        sequence.slot = kv.open()
        found = kv.reuse_prefix(sequence)
        kv.extend(sequence.slot, (0, 1), len(prompt))
        kv.cache_prefix(sequence, len(prompt))
        kv.close(sequence.slot)
        return found

    assert [run(p) for p in prompts] == [0, 0, 0]
    assert kv.cached_bytes == 10 * kv.layout.page_bytes
    # The first one's last page has gone; its first two are used again, so the second one's go next.
    assert run(prompts[0][:9]) == 8
    assert run((4,) * 6) == 0
    assert run(prompts[0]) == 8
    assert run(prompts[1]) == 0


def test_no_page_is_written_by_two_or_lost_whatever_happens():
    """Rows come, match, run, keep, leave layers, go; each reads its own tokens from its pages all the time."""
    rng = random.Random(1)
    kv = PagedKV(3, 1, 1, torch.float32, 4, prefix_bytes=30 * 32)
    kv.reserve(6, 64, 6 * 3 * 8)
    rows: list[Sequence] = []
    for step in range(1500):
        row = rng.choice(rows) if rows else None
        if len(rows) < 6 and rng.random() < 0.3:
            prompt = tuple(rng.choice((1, 2)) for _ in range(rng.choice((4, 8, 12)))) + (step,) * rng.randint(1, 5)
            rows.append(Sequence(step, Request(prompt, 1), Schedule.full(3)))
            rows[-1].slot = kv.open()
        elif row is None:
            continue
        elif rng.random() < 0.1:
            kv.close(row.slot)
            rows.remove(row)
        elif row.in_prefill:
            row.ran = kv.reuse_prefix(row)
            write(kv, row, min(row.ran + rng.randint(1, 9), len(row.request.prompt)))
            kv.cache_prefix(row, row.ran)
        elif row.ran < 30:
            if len(row.layers) > 1 and rng.random() < 0.2:
                kv.drop(row.slot, row.layers[-1:])
                row.layers = row.layers[:-1]
            row.output.append(step)
            write(kv, row, row.ran + 1)
        for each in rows:
            for layer in each.layers:
                found = [int(stored(kv, layer, each, i)) for i in range(each.ran)]
                assert found == [10_000 * layer + token for token in (*each.request.prompt, *each.output)[: each.ran]]
    for row in rows:
        kv.close(row.slot)
    assert all_pages_are_free(kv)


def stored(kv: PagedKV, layer: int, row: Sequence, position: int) -> torch.Tensor:
    return kv.pages[int(kv.table[layer, row.slot, position // 4]), 0, 0, position % 4]


def write(kv: PagedKV, row: Sequence, end: int) -> None:
    kv.extend(row.slot, row.layers, end)
    text = (*row.request.prompt, *row.output)
    for layer in row.layers:
        for position in range(row.ran, end):
            stored(kv, layer, row, position)[0] = 10_000 * layer + text[position]
    row.ran = end


@pytest.mark.parametrize("apart", [True, False])
def test_an_api_key_shares_prompts_with_itself_alone_where_told_so(apart: bool):
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("ann", "bob")}
    hashes = tuple(hashlib.sha256(name.encode()).hexdigest() for name in keys)
    body = {"model": "tiny", "prompt": "Tell nobody that the code is 1234. " * 2, "max_tokens": 4, "temperature": 0}
    with running(tiny_service(prefix_per_key=apart), ApiKeys(hashes)) as client:
        found = [client.post("/v1/completions", json=body, headers=keys[name]).json() for name in ("ann", "bob", "bob")]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found]
    assert cached == ([0, 0, 64] if apart else [0, 64, 64])
    assert len({answer["choices"][0]["text"] for answer in found}) == 1


def test_like_prompts_of_two_salts_that_come_together_share_nothing():
    engine = FastEngine(tiny_model("llama"), PAPER, prefix_cache=True)
    prompt = tuple(range(1, 50))
    rows = engine.decode([Request(prompt, 4, cache_salt=salt) for salt in ("a", "b", "a")])
    assert rows[0] == rows[1] == rows[2]
    assert (engine.stats.prompt_tokens, engine.stats.prefix_hit_tokens) == (49 * 3 - 48, 48)
