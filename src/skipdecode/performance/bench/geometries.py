"""Sizes of real models, for measurements with random weights: a step takes the same time whatever the weights are."""

from __future__ import annotations

from typing import Any

__all__ = ["GEOMETRIES", "build"]

GEOMETRIES: dict[str, dict[str, Any]] = {
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "ffn_dim": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 2048,
    },
    "opt-6.7b": {
        "model_type": "opt",
        "hidden_size": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 50272,
        "word_embed_proj_dim": 4096,
    },
    "opt-125m": {"model_type": "opt"},
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    },
}


def build(geometry: str, dtype: Any, device: Any = "cpu") -> Any:
    """A causal LM of a geometry of the table with random weights, made on its device, in eval mode."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(GEOMETRIES[geometry])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
