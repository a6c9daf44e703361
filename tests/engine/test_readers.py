"""Families of the fast engine in what sets them apart: norms, factors, windows, positions, fused and turned weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_tools import check_greedy, outputs_of
from skipdecode import Schedule
from skipdecode.engine import FastEngine, Request, StepOutput
from skipdecode.engine.fast_model import open_model
from skipdecode.errors import UnfitModelError
from tiny import LAYERS, tiny_model, uneven_model

NEW = 12
WINDOW = 6  # of the tiny models that have one
PROMPTS = [tuple(3 + 7 * i % 90 for i in range(45)), (5, 6, 7), tuple(range(60, 30, -1))]
NESTED = Schedule.from_speedup(LAYERS, 2, NEW)


def decode(engine: FastEngine, prompts: list[tuple[int, ...]]) -> list[list[StepOutput]]:
    return outputs_of(engine, [Request(prompt, NEW) for prompt in prompts])


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "phi3", "qwen2"])
def test_tokens_behind_the_window_are_not_seen_by_layers_that_slide(family: str) -> None:
    """Through the last layer alone, which slides, a prompt's last token sees a window and nothing before it."""
    schedule = Schedule(LAYERS, tuple(range(LAYERS - 1)), (1,), warmup_layers=0, prompt="max_exit")
    engine = FastEngine(uneven_model(family), schedule)
    prompt = PROMPTS[0]
    behind, within = ((*prompt[: -WINDOW - 1], 99, *prompt[-WINDOW:]), (*prompt[:-WINDOW], 99, *prompt[1 - WINDOW :]))
    found = [(row[0].token, row[0].logprob) for row in decode(engine, [prompt, behind, within])]
    assert found[0] == found[1] != found[2]


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
    for prompt, row in zip(PROMPTS, decode(FastEngine(model, NESTED), PROMPTS), strict=True):
        check_greedy(model, NESTED, prompt, row)


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
