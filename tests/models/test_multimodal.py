"""Multimodal checkpoints load as their text model, with the weights of the text model and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import skipdecode
from checkpoints import byte_tokenizer
from tiny import LATER, OPTIONS, tiny_model

_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_LLAMA4 = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "intermediate_size": 64}
KINDS = {
    "gemma3": ("gemma3_text", _VISION),
    "gemma4": ("gemma4_text", None),
    "llama4": ("llama4_text", _VISION | _LLAMA4),
    "mistral3": ("mistral", _VISION | {"head_dim": 8}),
    "qwen3_5": (
        "qwen3_5_text",
        {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
}


@pytest.mark.parametrize("kind", [kind for kind, (text, _) in KINDS.items() if text in {*LATER, *OPTIONS}])
@torch.no_grad()
def test_a_multimodal_checkpoint_is_its_text_model(kind: str, tmp_path: Path) -> None:
    text, vision = KINDS[kind]
    words = ("vocab_size", *(["vocab_size_per_layer_input"] if kind == "gemma4" else []))
    text_config = tiny_model(text, **dict.fromkeys(words, 259)).config.to_dict()
    given = {"text_config": text_config} | ({} if vision is None else {"vision_config": vision})
    config = AutoConfig.for_model(kind, **given)
    whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    whole.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = skipdecode.load(tmp_path, dtype="float32")
    ids = torch.tensor([[5, 6, 7, 8]])
    reader = whole.language_model if kind == "llama4" else whole  # whose forward fails without images in 5.24
    torch.testing.assert_close(loaded.model(ids).logits, reader(input_ids=ids).logits, rtol=0, atol=1e-5)
    assert loaded.model.config.model_type == text
    assert skipdecode.LLM(loaded).generate(["ab"], schedule="1.5x", max_new_tokens=3)[0].tokens
