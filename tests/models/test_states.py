"""Recurrent states: what transformers does with them, as the families say, and what an attached model does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from every import GREEDY
from oracle import active_tokens, oracle_logits, position_ids
from skipdecode import Schedule, attach
from skipdecode.engine import GatedEngine
from skipdecode.engine.requests import Request
from skipdecode.errors import DepthWarning, ScheduleError, UnsupportedFeatureError
from skipdecode.models.families import FAMILIES, lent_last
from skipdecode.models.release import before, model_cache_name
from tiny import LATER, LAYERS, RANDOM_NESTED, SCHEDULES, VOCAB, ragged_prompts, shared_model, tiny_model

RECURRENT = [family for family in LATER if FAMILIES[family].recurrent]
FEW = ["falcon_h1", "jamba", "lfm2", "nemotron_h", "qwen3_5_text"]  # one of each kind
few = pytest.mark.parametrize("family", [each for each in FEW if each in RECURRENT])
every = pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in FEW else pytest.mark.slow) for each in RECURRENT]
)
IDS = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
FALLING = SCHEDULES["paper"]


def pieces(model: Any, ids: torch.Tensor, sizes: list[int], cache: Any, **options: Any) -> torch.Tensor:
    """Logits of a text that is fed in pieces to a cache."""
    name, outputs, start = model_cache_name(model), [], 0
    for size in sizes:
        part = slice(start, start + size)
        named = {
            key: value[:, part] if key == "position_ids" else value[:, : part.stop] for key, value in options.items()
        }
        outputs.append(model(input_ids=ids[:, part], use_cache=True, **{name: cache}, **named).logits)
        start += size
    return torch.cat(outputs, 1)


def placed(model: Any) -> dict[str, torch.Tensor]:
    return position_ids(model, torch.ones_like(IDS))


# ---------------------------------------------------------------------- transformers alone, as the table has it


@every
@torch.no_grad()
def test_the_table_says_what_types_do_in_several_tokens_and_without_positions(family: str) -> None:
    model = shared_model(family)
    whole = model(input_ids=IDS, use_cache=False).logits
    for sizes, named, said in (
        ([5, 4, 3], placed(model), FAMILIES[family].continues),
        ([9, 1, 1, 1], {}, FAMILIES[family].counts_positions),
    ):
        made = pieces(model, IDS, sizes, DynamicCache(config=model.config), **named)
        assert bool((made - whole).abs().max() < 1e-3) == said


@pytest.mark.parametrize("family", [each for each in RECURRENT if each in ("lfm2", "mamba2")])
def test_the_table_says_whether_generate_goes_on_from_a_used_cache(family: str) -> None:
    model, name = shared_model(family), model_cache_name(shared_model(family))
    asked = {"max_new_tokens": 3} | GREEDY
    first = model.generate(IDS[:, :6], attention_mask=torch.ones_like(IDS[:, :6]), **asked)
    text = torch.cat([first.sequences, IDS[:, 6:]], 1)
    asked |= {"attention_mask": torch.ones_like(text)}
    fresh, again = (model.generate(text, **asked, **of) for of in ({}, {name: first.past_key_values}))
    right = bool((fresh.logits[0] - again.logits[0]).abs().max() < 1e-3)
    assert right == (FAMILIES[family].resumes_cache and FAMILIES[family].continues)
    if not FAMILIES[family].resumes_cache:
        with attach(model, FALLING) as attachment:
            model(input_ids=IDS, **{name: (cache := attachment.new_cache(12))})
            with pytest.raises(UnsupportedFeatureError, match="second turn"):
                model.generate(text, **asked, **{name: cache})


@pytest.mark.parametrize("family", [each for each in ("nemotron_h", "zamba2", "granitemoehybrid") if each in RECURRENT])
@torch.no_grad()
def test_transformers_bounds_dt_in_long_forwards_alone_and_an_attached_model_does_in_steps_too(family: str) -> None:
    limits = {"time_step_limit": (0.5, 0.6)} if family == "granitemoehybrid" else {"time_step_min": 0.9}
    model = tiny_model(family, **limits)
    whole = model(input_ids=IDS, use_cache=False, **placed(model)).logits
    made = pieces(model, IDS, [6] + [1] * 6, DynamicCache(config=model.config), **placed(model))
    assert (made - whole).abs().max() > 1e-3
    active = active_tokens(FALLING, 6, 12)
    expected = oracle_logits(model, IDS, torch.ones_like(IDS), active)
    with attach(model, FALLING) as attachment:
        made = pieces(model, IDS, [6] + [1] * 6, attachment.new_cache(6), **placed(model))
    assert (made - expected).abs().max() < 1e-4


# ---------------------------------------------------------------------- under a schedule


@every
@pytest.mark.parametrize("prompt", ["full", "max_exit"])
@torch.no_grad()
def test_pieces_and_a_second_turn_equal_the_oracle(family: str, prompt: str) -> None:
    model, schedule = shared_model(family), replace(FALLING, prompt=prompt)
    text = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(4))
    active = active_tokens(schedule, 8, 16)
    # The second turn: one generated token and its tokens.
    active[:, 12:] = torch.tensor([[n in schedule.layers(10**6)] for n in range(LAYERS)])
    expected = oracle_logits(model, text, torch.ones_like(text), active)
    named = position_ids(model, torch.ones_like(text)) if "backbone" not in FAMILIES[family].layers else {}
    with attach(model, schedule) as attachment:
        cache = attachment.new_cache(8)
        with pytest.warns(DepthWarning, match="second turn"):
            made = pieces(model, text, [1, 2, 5, 1, 1, 1, 5], cache, **named)
    assert (made - expected).abs().max() < 1e-4


@every
@torch.no_grad()
def test_moved_rows_and_freed_states(family: str) -> None:
    """A permutation of the rows in the middle of a text; layers that are skipped give their states back."""
    model, order = shared_model(family), torch.tensor([1, 0])
    with attach(model, FALLING) as attachment:
        plain, moved = attachment.new_cache(6), attachment.new_cache(6)
        wanted = pieces(model, IDS, [6, 1, 1, 1, 1, 1, 1], plain)
        first = pieces(model, IDS[:, :8], [6, 1, 1], moved)
        moved.reorder_cache(order)
        name = model_cache_name(model)
        rest = [model(input_ids=IDS[order][:, c : c + 1], **{name: moved}).logits for c in range(8, 12)]
    assert (torch.cat([first, torch.cat(rest, 1)[order]], 1) - wanted).abs().max() < 1e-5
    assert plain.kv_bytes() == moved.kv_bytes() < plain.kv_bytes_full()
    with attach(model, Schedule.full(LAYERS)) as attachment:
        whole = attachment.new_cache(6)
        pieces(model, IDS, [6, 1, 1, 1, 1, 1, 1], whole)
    if not (before("5.23") and family == "nemotron_h"):  # whose layers of experts have caches there
        assert plain.kv_bytes_full() == pytest.approx(whole.kv_bytes(), rel=0.02)
    whole.reset()
    assert whole.kv_bytes() == 0


@few
def test_a_row_of_the_engine_is_the_row_alone(family: str) -> None:
    prompts = [(5, 6, 7, 8, 9, 10, 11), (12, 13), (14,), (15, 16, 17, 18)]
    requests = [Request(prompt, max_new_tokens=5 + 2 * n) for n, prompt in enumerate(prompts)]
    model = shared_model(family)
    found = [GatedEngine(model, RANDOM_NESTED, max_rows=rows).decode(requests) for rows in (4, 1)]
    assert [row.tokens for row in found[0]] == [row.tokens for row in found[1]]


@pytest.mark.parametrize("family", [*FEW, "deepseek_v3", "gemma4_text", "gpt_oss", "olmoe"])
def test_gradients_equal_the_oracles(family: str) -> None:
    model = tiny_model(family).train()
    active = active_tokens(schedule := lent_last(model.config, FALLING), 5, 12)
    loss = cross_entropy(oracle_logits(model, IDS, torch.ones_like(IDS), active).flatten(0, 1), IDS.flatten())
    parameters = [each for each in model.parameters() if each.requires_grad]
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    with attach(model, schedule):
        logits = model(input_ids=IDS, prompt_length=5).logits
    found = torch.autograd.grad(cross_entropy(logits.flatten(0, 1), IDS.flatten()), parameters, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() < 1e-4


@few
@torch.no_grad()
def test_what_would_spoil_a_state_is_refused(family: str) -> None:
    model, (ids, mask) = shared_model(family), ragged_prompts((6, 5))
    with attach(model, FALLING) as attachment, pytest.raises(ScheduleError, match="full or max_exit"):
        attachment.schedule = replace(FALLING, prompt=(0, 1, 2))
    name = model_cache_name(model)
    with attach(model, FALLING) as attachment:
        with pytest.raises(UnsupportedFeatureError, match="piece of a prompt"):
            model(input_ids=ids[:, :1], attention_mask=mask[:, :1], **{name: attachment.new_cache(6)})
        cache = attachment.new_cache(6)
        model(input_ids=ids, attention_mask=mask, **{name: cache})
        hidden = torch.cat([mask.flip(0), mask.new_ones(2, 2)], 1)
        with pytest.raises(UnsupportedFeatureError, match="hides"):
            model(input_ids=ids[:, :2], attention_mask=hidden, **{name: cache})
    assert replace(FALLING, prompt=(0, 1, 2)).projected
