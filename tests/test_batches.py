"""Generating batches of token ids through transformers: tokens, sampling, ends, and what a batch cost."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints import byte_tokenizer
from skipdecode import Schedule, attach
from skipdecode.data.prompts import EncodedPrompt
from skipdecode.data.records import Record
from skipdecode.data.run import make_batches
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.backend import GenerationSettings
from skipdecode.engine.transformers_backend import TransformersBackend
from skipdecode.errors import UsageError
from tiny import LAYERS, tiny_model

PAPER = Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8)
PROMPTS = [[5, 9, 33], [40, 41, 42, 43, 44, 45, 46], [7], [100, 90, 80, 70]]
GREEDY = GenerationSettings(10)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def backend(model: Any, schedule: Schedule | None = PAPER, end_tokens: tuple[int, ...] = ()) -> TransformersBackend:
    return TransformersBackend(model, schedule, end_tokens=end_tokens, pad_token=0)


@pytest.mark.parametrize("schedule", [PAPER, None], ids=["paper", "full"])
def test_batch_gives_what_generate_gives_row_by_row(model: Any, schedule: Schedule | None):
    result = backend(model, schedule).generate(PROMPTS, GREEDY, range(4))
    assert result.finish_reasons == ["length"] * 4
    for prompt, tokens in zip(PROMPTS, result.tokens, strict=True):
        with attach(model, schedule or Schedule.full(LAYERS)):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)
        assert tokens == alone[0, len(prompt) :].tolist()


def test_layers_and_bytes_are_those_of_the_schedule(model: Any):
    result = backend(model).generate(PROMPTS, GREEDY, range(4))
    assert result.steps == 9
    assert result.step_layers == sum(PAPER.budget(i) for i in range(9))
    per_token = 2 * 2 * 8 * 4 * len(PROMPTS)  # keys and values, heads, head size, fp32, rows
    assert result.kv_bytes == per_token * (7 * LAYERS + result.step_layers)
    assert result.kv_bytes_full == per_token * (7 + 9) * LAYERS
    full = backend(model, None).generate(PROMPTS, GREEDY, range(4))
    assert (full.step_layers, full.kv_bytes, full.kv_bytes_full) == (9 * LAYERS, *[result.kv_bytes_full] * 2)


def test_times_are_those_of_prompt_and_steps(model: Any):
    started = time.perf_counter()
    result = backend(model).generate(PROMPTS, GREEDY, range(4))
    passed = time.perf_counter() - started
    assert 0 < result.prefill_s < passed
    assert 0.3 * passed < result.prefill_s + result.decode_s < passed


def test_end_token_ends_its_row_only_and_is_counted(model: Any):
    plain = backend(model).generate(PROMPTS, GREEDY, range(4)).tokens
    end = plain[0][4]
    result = backend(model, end_tokens=(end,)).generate(PROMPTS, GREEDY, range(4))
    for before, tokens, reason in zip(plain, result.tokens, result.finish_reasons, strict=True):
        expected = before[: before.index(end) + 1] if end in before else before
        assert (tokens, reason) == (expected, "eos" if end in before else "length")
    ignored = backend(model, end_tokens=(end,)).generate(PROMPTS, replace(GREEDY, ignore_eos=True), range(4))
    assert ignored.tokens == plain


def test_stop_check_ends_its_row_only(model: Any):
    plain = backend(model).generate(PROMPTS, GREEDY, range(4)).tokens
    last = plain[1][3]
    result = backend(model).generate(PROMPTS, GREEDY, range(4), lambda tokens: tokens[-1] == last)
    for before, tokens, reason in zip(plain, result.tokens, result.finish_reasons, strict=True):
        expected = before[: before.index(last) + 1] if last in before else before
        assert (tokens, reason) == (expected, "stop" if last in before else "length")


def test_checkpoint_defaults_do_not_change_what_was_asked_for(model: Any):
    plain = backend(model).generate(PROMPTS, GREEDY, range(4)).tokens
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    try:
        assert backend(model).generate(PROMPTS, GREEDY, range(4)).tokens == plain
        assert model.generation_config.repetition_penalty == 5.0
    finally:
        model.generation_config.repetition_penalty, model.generation_config.do_sample = 1.0, False


def test_seed_fixes_a_row_in_any_batch_and_order(model: Any):
    settings = GenerationSettings(10, temperature=1.0, seed=3)
    together = backend(model).generate(PROMPTS, settings, range(4)).tokens
    turned = backend(model).generate(PROMPTS[::-1], settings, [3, 2, 1, 0]).tokens
    alone = [backend(model).generate([p], settings, [i]).tokens[0] for i, p in enumerate(PROMPTS)]
    assert together == turned[::-1] == alone
    assert backend(model).generate(PROMPTS, replace(settings, seed=4), range(4)).tokens != together


def test_rows_with_the_same_prompt_draw_differently(model: Any):
    result = backend(model).generate([[5, 9, 33]] * 20, GenerationSettings(4, temperature=1.0), range(20))
    assert len({tuple(t) for t in result.tokens}) > 10


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"top_p": 0.6}])
def test_sampling_draws_from_the_models_distribution(model: Any, limits: dict[str, Any]):
    prompt, rows, temperature = [5, 9, 33], 4000, 0.8
    with torch.inference_mode():
        p = torch.softmax(model(torch.tensor([prompt])).logits[0, -1] / temperature, -1)
    order = p.argsort(descending=True)
    kept = len(p)
    if "top_k" in limits:
        kept = limits["top_k"]
    if "top_p" in limits:
        kept = int((p[order].cumsum(0) < limits["top_p"]).sum()) + 1
    expected = {int(t): float(p[t] / p[order[:kept]].sum()) for t in order[:kept]}
    settings = GenerationSettings(1, temperature=temperature, **limits)
    result = backend(model).generate([prompt] * rows, settings, range(rows))
    drawn = Counter(t[0] for t in result.tokens)
    assert set(drawn) <= set(expected)
    for token, share in expected.items():
        assert abs(drawn[token] / rows - share) < 5 * (share * (1 - share) / rows) ** 0.5 + 1 / rows


@pytest.mark.parametrize(
    ("name", "value"), [("max_new_tokens", 0), ("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)]
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: float):
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        GenerationSettings(**({"max_new_tokens": 5, "temperature": 1.0} | {name: value}))


# ---------------------------------------------------------------------- batches and stop strings


def prompt_of(index: int, length: int, room: int | None = 50) -> EncodedPrompt:
    return EncodedPrompt(Record(index, index + 1, index, "p"), "p", [1] * length, room)


def test_batches_hold_like_lengths_longest_first():
    lengths = [3, 9, 1, 7, 7, 2, 8]
    batches = [([len(p.token_ids) for p in b], n) for b, n in make_batches([*map(prompt_of, range(7), lengths)], 3, 20)]
    assert batches == [([9, 8, 7], 20), ([7, 3, 2], 20), ([1], 20)]


def test_rows_with_little_room_do_not_cut_their_neighbours_short():
    prompts = [prompt_of(0, 95, 1), prompt_of(1, 90, 6), prompt_of(2, 90, 6), prompt_of(3, 60, 36), prompt_of(4, 5, 91)]
    found = [([p.record.index for p in batch], limit) for batch, limit in make_batches(prompts, 8, 20)]
    assert found == [([0], 1), ([1, 2], 6), ([3, 4], 20)]


def test_stop_strings_are_seen_at_once_and_cut_off():
    tokenizer = byte_tokenizer()
    stop = StopStrings(tokenizer, ["END", "é"])
    tokens = tokenizer("some text END more é", add_special_tokens=False).input_ids
    assert next(n for n in range(1, len(tokens)) if stop(tokens[:n])) == len("some text END")
    assert stop.cut("some text END more é") == "some text "
    assert stop.cut("caf\u00e9 END") == "caf"
    assert stop.cut("nothing") == "nothing"
    with pytest.raises(UsageError, match="empty"):
        StopStrings(tokenizer, ["x", ""])
