"""Cached decoding under a schedule equals the uncached form, for every family, schedule and prompt depth."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from every import EVERY, GREEDY, decoded, suited
from oracle import active_tokens, alone_logits, oracle_logits
from products import in_turn
from skipdecode import Schedule, attach
from skipdecode.errors import ScheduleError, UnsupportedModelError
from skipdecode.models.families import lenders
from tiny import LATER, LAYERS, OPTIONS, RANDOM_NESTED, SCHEDULES, ragged_prompts, shared_model, tiny_model

NEW = 12  # past the last change of depth of every schedule
TOLERANCE = 1e-4
PROMPTS = {"full": "full", "max-exit": "max_exit", "first-three": (0, 1, 2), "with-gaps": (0, 1, 3, 6)}


def decode(model, schedule, ids, mask, **options):
    """Greedy text (rows, columns) and the logits of its steps (rows, NEW, vocabulary), cached, under a schedule."""
    out = decoded(model, schedule, ids, mask, NEW, **options)
    return out.sequences, torch.stack(out.logits, 1), out.past_key_values


@torch.no_grad()
def check(model, schedule, ids, mask):
    """The logits of a batch are the oracle's; returns its text and logits."""
    text, logits, _ = decode(model, schedule, ids, mask)
    prompt = ids.shape[1]
    long_mask = torch.cat([mask, mask.new_ones(len(ids), NEW)], 1)
    expected = oracle_logits(model, text, long_mask, active_tokens(schedule, prompt, text.shape[1]))
    assert (logits - expected[:, prompt - 1 : -1]).abs().max() < TOLERANCE
    everything = torch.ones(LAYERS, text.shape[1], dtype=torch.bool)
    at_full_depth = oracle_logits(model, text, long_mask, everything)
    assert (at_full_depth - expected)[:, prompt:].abs().max() > 100 * TOLERANCE, "the schedule must matter"
    return text, logits


@pytest.mark.parametrize(("family", "name", "prompt"), in_turn(sorted(OPTIONS), SCHEDULES, PROMPTS, slow=LATER))
def test_cached_equals_uncached_of_each_row_alone_too(family: str, name: str, prompt: str):
    model, (ids, mask) = shared_model(family), ragged_prompts()
    schedule = replace(SCHEDULES[name], prompt=PROMPTS[prompt])
    if (schedule := suited(family, schedule)) is None:
        return
    text, logits = check(model, schedule, ids, mask)
    for row in range(len(ids)):
        alone = alone_logits(model, schedule, text, mask, ids.shape[1], row)
        assert (logits[row] - alone).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma2", "opt", "gpt2", "mistral", "falcon", "bloom"])
def test_eager_attention(family: str, schedule: Schedule):
    check(tiny_model(family, attn_implementation="eager"), schedule, *ragged_prompts())


@pytest.mark.parametrize("changes", [{"alibi": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_falcon_variants(changes, schedule: Schedule):
    check(tiny_model("falcon", **changes), schedule, *ragged_prompts())


@pytest.mark.parametrize("family", EVERY)
def test_full_depth_is_the_untouched_model(family: str):
    model = shared_model(family)
    ids, mask = ragged_prompts()
    plain = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, use_cache=True, **GREEDY)
    text, logits, _ = decode(model, Schedule.full(LAYERS), ids, mask)
    assert torch.equal(text, plain.sequences)
    assert torch.equal(logits, torch.stack(plain.logits, 1))


@pytest.mark.parametrize("family", LATER)
@torch.no_grad()
def test_cached_equals_uncached_in_a_ragged_batch(family: str) -> None:
    model, (ids, mask) = shared_model(family), ragged_prompts((7, 3))
    for schedule in (replace(SCHEDULES["constant"], prompt="max_exit"), RANDOM_NESTED):
        if (schedule := suited(family, schedule)) is None:
            continue
        text = decoded(model, schedule, ids, mask, 4)
        whole = torch.cat([mask, mask.new_ones(2, 4)], 1)
        active = active_tokens(schedule, 7, 7 + 4)
        expected = oracle_logits(model, text.sequences, whole, active)[:, 6:-1]
        torch.testing.assert_close(torch.stack(text.logits, 1), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif("gemma4_text" not in LATER, reason="this transformers has no Gemma 4")
def test_layers_that_others_read_are_dropped_last_or_the_schedule_is_refused() -> None:
    model = shared_model("gemma4_text")  # layers 5 to 7 read the keys and values of 1 and 4
    assert lenders(model.config) == {5: 1, 6: 4, 7: 1}
    with pytest.raises(ScheduleError, match="layer 5 reads the keys and values of layer 1"):
        attach(model, SCHEDULES["paper"])
    with attach(model, "1.6x") as attachment:
        assert attachment.schedule.drop_order == (2, 3, 5, 6, 4)
    with pytest.raises(ScheduleError, match="8 layers"):
        attach(model, "4x")
    config = copy.deepcopy(model.config)
    config.layer_types = ["sliding_attention"] * 7 + ["full_attention"]  # what such a small config without any gets
    with pytest.raises(UnsupportedModelError, match="no layer makes the keys and values"):
        lenders(config)
