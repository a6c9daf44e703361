"""Families of the fast engine in what sets them apart: norms, factors, windows, positions, fused and turned weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_tools import FAST
from oracle import active_tokens, oracle_logits
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request
from skipdecode.engine.fast_model import open_model
from skipdecode.errors import UnfitModelError
from skipdecode.models.families import family_of
from tiny import LAYERS, tiny_model

NEW = 12
WINDOW = 6  # of the tiny models that have one
PROMPTS = [tuple(3 + 7 * i % 90 for i in range(45)), (5, 6, 7), tuple(range(60, 30, -1))]
SCHEDULES = {
    "nested": Schedule.from_speedup(LAYERS, 2, NEW),
    "flat": Schedule.even(LAYERS, 4),
    "split": Schedule.split(LAYERS, 4, [5, 5, 4, 3]),
}


def uneven_model(family: str, seed: int = 5, **changes: Any) -> Any:
    """A tiny model whose norms' weights, and biases, are not all alike."""
    model = tiny_model(family, seed=seed, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def check_against_oracle(model: Any, schedule: Schedule, prompt: tuple[int, ...], row: list[Any]) -> None:
    """Tokens and log-probabilities of a greedy row."""
    text = torch.tensor([[*prompt, *(out.token for out in row)]])
    active = active_tokens(schedule, len(prompt), text.shape[1])
    with torch.no_grad():
        logits = oracle_logits(model, text, torch.ones_like(text), active)[0, len(prompt) - 1 : -1]
    logprobs = logits.log_softmax(-1)
    picked = logprobs[torch.arange(len(row)), text[0, len(prompt) :]]
    torch.testing.assert_close(picked, logprobs.max(-1).values, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.tensor([out.logprob for out in row]), picked, rtol=0, atol=1e-4)


def decode(engine: FastEngine, prompts: list[tuple[int, ...]]) -> list[list[Any]]:
    rows: dict[int, list[Any]] = {}
    for out in engine.run([Request(prompt, NEW) for prompt in prompts]):
        rows.setdefault(out.request, []).append(out)
    return [rows[number] for number in sorted(rows)]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("family", FAST)
def test_batches_rows_alone_prompts_in_parts_and_second_turns_are_the_oracles(family: str, schedule: Schedule) -> None:
    if schedule.projected and family_of(family).recurrent:
        pytest.skip("refused: see test_engine")
    model = uneven_model(family)
    fast = open_model(model)
    batch = decode(FastEngine(fast, schedule, max_rows=2, refill_below=1, prompt_tokens=7), PROMPTS)
    engine = FastEngine(fast, schedule, prefix_cache=True)
    for prompt, row in zip(PROMPTS, batch, strict=True):
        check_against_oracle(model, schedule, prompt, row)
        (alone,) = decode(engine, [prompt])
        assert [out.token for out in alone] == [out.token for out in row]
        second = (*prompt, *(out.token for out in row), 8, 9, 10)
        check_against_oracle(model, schedule, second, decode(engine, [second])[0])
    assert (engine.stats.prefix_hit_tokens > 0) != bool(fast.rings)


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "phi3", "qwen2"])
def test_tokens_behind_the_window_are_not_seen_by_layers_that_slide(family: str) -> None:
    """Through the last layer alone, which slides, a prompt's last token sees a window and nothing before it."""
    schedule = Schedule(LAYERS, tuple(range(LAYERS - 1)), (1,), warmup_layers=0, prompt="max_exit")
    engine = FastEngine(uneven_model(family), schedule)
    prompt = PROMPTS[0]
    behind, within = (
        (*prompt[: -WINDOW - 1], 99, *prompt[-WINDOW:]),
        (*prompt[:-WINDOW], 99, *prompt[1 - WINDOW :]),
    )
    found = [(row[0].token, row[0].logprob) for row in decode(engine, [prompt, behind, within])]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("family", ["ernie4_5", "gemma2", "gemma3_text", "gpt2", "granite", "olmo2", "phi3"])
def test_bf16_rows_are_the_same_alone_and_in_any_batch(family: str) -> None:
    fast, schedule = open_model(uneven_model(family).bfloat16()), SCHEDULES["nested"]
    together = decode(FastEngine(fast, schedule, prompt_tokens=16), PROMPTS)
    alone = [decode(FastEngine(fast, schedule), [prompt])[0] for prompt in PROMPTS]
    assert [[(o.token, o.logprob) for o in row] for row in together] == [
        [(o.token, o.logprob) for o in row] for row in alone
    ]


_ROPE = {"rope_theta": 1e4, "rope_type": "default"}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 0.5, "attn_implementation": "eager"}),
        (
            "ministral3",
            {"rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.9, "original_max_position_embeddings": 8}},
        ),
        ("phi3", {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}),
        ("gemma3_text", {"attn_logit_softcapping": 0.5}),
        ("llama", {"final_logit_softcapping": 3.0, "logits_scaling": 8.0, "residual_multiplier": 0.5}),
    ],
)
def test_details_of_a_model_are_read_as_its_family_applies_them(family: str, changes: dict[str, Any]) -> None:
    model = tiny_model(family, **changes)
    for prompt, row in zip(PROMPTS, decode(FastEngine(model, SCHEDULES["nested"]), PROMPTS), strict=True):
        check_against_oracle(model, SCHEDULES["nested"], prompt, row)


def test_embeddings_are_scaled_as_far_as_the_weights_type_tells() -> None:
    """Gemma's factor, the root of the hidden size, is rounded to the weights' type; Granite's is not."""
    spec = [open_model(tiny_model(f, hidden_size=40).bfloat16()).spec for f in ("gemma3_text", "granite")]
    assert spec[0].embedding_scale == torch.tensor(40**0.5).bfloat16().item() != 40**0.5
    assert spec[1].embedding_scale == pytest.approx(3.0 / 0.3)


def test_a_model_of_turned_weights_is_saved_as_it_was(tmp_path: Path) -> None:
    model = uneven_model("gpt2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    open_model(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(again.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "later tokens"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "'gelu'"),
        ("gpt2", {"activation_function": "gelu"}, "'gelu'"),
        ("granite", {"residual_multiplier": -0.5}, "residual_multiplier"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("opt", {"word_embed_proj_dim": 16}, "embeddings"),
    ],
)
def test_details_that_are_not_covered_are_refused(family: str, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(UnfitModelError, match=re.escape(what)):
        open_model(tiny_model(family, **changes))
