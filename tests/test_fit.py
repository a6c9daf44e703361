"""Fits: bridges over skipped layers and given keys and values of prompts, against the uncached oracle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from oracle import active_tokens, layer_list, oracle_logits
from skipdecode import Schedule, attach
from skipdecode.engine.fast import FastEngine
from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.requests import Request
from skipdecode.errors import FitError
from skipdecode.models.families import FAMILIES
from skipdecode.models.fit import Bridge, Fit, PromptMap, keep_fit
from tiny import LAYERS, ragged_prompts, tiny_model

NEW = 12
TOLERANCE = 1e-4
LOWER = (0, 1, 2)
GAPS = (0, 1, 3, 6)


@cache
def model_of(family: str):
    return tiny_model(family)


def projections(model):
    """Key projections of the layers; None where a layer makes queries, keys and values in one product."""
    named = [dict(layer.named_modules()) for layer in layer_list(model)]
    return [next((m for path, m in modules.items() if path.endswith("k_proj")), None) for modules in named]


def random_fit(model, prompts=(), *, rank=4, taps=0, seed=0):
    """Bridges over all layers but the first and last, and maps of all layers for each prompt set."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape, size=0.3):
        return torch.randn(*shape, generator=random) * size

    width, layers = model.config.hidden_size, len(layer_list(model))
    bridges = {n: Bridge(draw(rank, width), draw(width, rank), draw(width)) for n in range(1, layers - 1)}
    keys = [None if p is None else p.weight.shape[0] for p in projections(model)]
    maps = {
        tuple(prompt): {
            n: PromptMap(draw(2 * keys[n], (taps + 1) * width), draw(2 * keys[n]), draw(2 * keys[n]))
            for n in range(layers)
            if n not in prompt
        }
        for prompt in prompts
    }
    return Fit(layers, width, bridges, maps, taps)


def decode(model, schedule, fit, ids, mask):
    with attach(model, schedule, fit), torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences, torch.stack(out.logits, 1)


@torch.no_grad()
def check(model, schedule, fit):
    ids, mask = ragged_prompts()
    text, logits = decode(model, schedule, fit, ids, mask)
    prompt = ids.shape[1]
    long_mask = torch.cat([mask, mask.new_ones(len(ids), NEW)], 1)
    active = active_tokens(schedule, prompt, text.shape[1])
    expected = oracle_logits(model, text, long_mask, active, fit, schedule, prompt)
    assert (logits - expected[:, prompt - 1 : -1]).abs().max() < TOLERANCE
    without = oracle_logits(model, text, long_mask, active)
    assert (without - expected)[:, prompt:].abs().max() > 100 * TOLERANCE, "the fit must matter for this test"
    for row in range(len(ids)):
        own = ids[row, mask[row].bool()][None]
        alone, _ = decode(model, schedule, fit, own, torch.ones_like(own))
        assert alone[0, own.shape[1] :].tolist() == text[row, prompt:].tolist()


FALLING = Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="falling")
FLAT = Schedule.even(LAYERS, (5,))
SCHEDULES = pytest.mark.parametrize("schedule", [FALLING, FLAT], ids=["falling", "flat"])


@SCHEDULES
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bridges_equal_the_oracle(family, schedule: Schedule):
    model = model_of(family)
    check(model, schedule, random_fit(model))
    check(model, replace(schedule, prompt="max_exit"), random_fit(model))


@SCHEDULES
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize(("prompt", "taps"), [(LOWER, 0), (LOWER, 2), (GAPS, 1)])
def test_given_keys_equal_the_oracle(family, prompt, taps, schedule: Schedule):
    model, own = model_of(family), replace(schedule, prompt=prompt)
    if None in projections(model):
        fit = Fit(LAYERS, model.config.hidden_size, {}, {prompt: {n: _map(model) for n in range(LAYERS)}})
        with pytest.raises(FitError, match="one product"):
            attach(model, own, fit)
        return
    check(model, own, random_fit(model, [prompt], taps=taps))


def _map(model):
    return PromptMap(torch.zeros(8, model.config.hidden_size), torch.zeros(8), torch.zeros(8))


def test_prompts_of_another_set_are_projected():
    model, schedule = model_of("llama"), replace(Schedule.from_speedup(LAYERS, 2, seq_len=8), prompt=GAPS)
    whole = random_fit(model, [LOWER])
    fit = Fit(LAYERS, model.config.hidden_size, {}, {LOWER: {n: whole.prompt_map(LOWER, n) for n in range(3, LAYERS)}})
    ids, mask = ragged_prompts()
    assert torch.equal(decode(model, schedule, fit, ids, mask)[1], decode(model, schedule, None, ids, mask)[1])


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text", "gpt2", "qwen3", "mistral"])
@pytest.mark.parametrize(("prompt", "taps"), [("full", 0), ("max_exit", 0), (LOWER, 0), (LOWER, 2), (GAPS, 1)])
def test_the_fast_engine_equals_the_gates(family, prompt, taps):
    """In batches, with parts of prompts of a few tokens, and with a prefix cache."""
    model = tiny_model(family).eval()
    prompts = [] if isinstance(prompt, str) or None in projections(model) else [prompt]
    keep_fit(model, random_fit(model, prompts, taps=taps))
    schedule = replace(Schedule.from_speedup(LAYERS, 2, seq_len=8), prompt=prompt)
    random = torch.Generator().manual_seed(3)
    first = torch.randint(3, 100, (40,), generator=random).tolist()
    texts = [first, [*first[:33], 7, 8, 9], [5, 6], torch.randint(3, 100, (21,), generator=random).tolist(), [4]]
    requests = [Request(tuple(text), max_new_tokens=NEW) for text in texts]
    expected = [row.tokens for row in GatedEngine(model, schedule, max_rows=1).decode(requests)]
    for options in ({"max_rows": 4}, {"max_rows": 2, "prompt_tokens": 8}, {"max_rows": 3, "prefix_cache": True}):
        engine = FastEngine(model, schedule, **options)
        assert [row.tokens for row in engine.decode(requests)] == expected, options
        if options.get("prefix_cache"):
            assert [row.tokens for row in engine.decode(requests)] == expected
            assert engine.stats.prefix_hit_tokens
