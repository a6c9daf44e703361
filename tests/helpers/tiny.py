"""Tiny random models of every family, with weights large enough that leaving a layer out shows, and schedules."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shrink import shrunk
from skipdecode import Schedule
from skipdecode.models.families import FAMILIES
from skipdecode.schedule.order import top_down

LAYERS = 8
VOCAB = 101
_SLIDING = {"sliding_window": 6}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **_HEADS,
}
_GPT2 = {"n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256, "vocab_size": VOCAB}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)} | _SLIDING
# Gemma 3's pattern: the first full-attention layer is number 5, which bottom-up schedules skip.
_LATE_FULL = {
    "layer_types": [("full_attention" if i % 6 == 5 else "sliding_attention") for i in range(LAYERS)]
} | _SLIDING

OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("arcee", "cohere", "gpt_neox", "llama", "nemotron", "olmo", "olmo2"), _COMMON),
    **dict.fromkeys(("persimmon", "smollm3", "stablelm"), _COMMON),
    **dict.fromkeys(["gemma", "glm", "glm4", "helium", "qwen3", "seed_oss"], _COMMON | {"head_dim": 8}),
    **dict.fromkeys(("mistral", "phi3", "starcoder2"), _COMMON | _SLIDING),
    "bloom": {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
    "codegen": _GPT2 | {"rotary_dim": 4, "n_ctx": 256},
    **dict.fromkeys(("cohere2", "exaone4", "olmo3"), _COMMON | _LATE_FULL),
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "new_decoder_architecture": False,
        "parallel_attn": True,
        "multi_query": True,
    },
    "gemma2": _COMMON | {"head_dim": 8} | _ALTERNATING,
    **dict.fromkeys(("gemma3_text", "ministral"), _COMMON | {"head_dim": 8} | _LATE_FULL),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2 | {"multi_query": True},
    "gpt_neo": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": LAYERS,
        "num_heads": 4,
        "max_position_embeddings": 256,
        "window_size": 6,
        "attention_types": [[["global", "local"], LAYERS // 2]],
    },
    "gptj": _GPT2 | {"rotary_dim": 4},
    "granite": _COMMON
    | {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 1.7},
    "mixtral": _COMMON | {"num_local_experts": 4, "sliding_window": None},
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "phi": _COMMON | {"num_key_value_heads": 4},
    "qwen2": _COMMON | {"use_sliding_window": True, "max_window_layers": 4} | _SLIDING,
    "qwen2_moe": _COMMON | _MOE | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": _COMMON | _MOE | {"head_dim": 8},
}

# The families whose tiny models `shrink.py` makes, as far as this transformers has them; most of their tests are slow.
LATER = sorted(set(FAMILIES) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(OPTIONS))

# Rotary positions of long texts.
ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}

# A drop order with no pattern, and budgets that stay level, jump by several layers and fall to the floor.
RANDOM_NESTED = Schedule(LAYERS, (4, 1, 6, 3, 5, 2), (8, 7, 7, 4, 4, 3, 2), name="random-nested")
SCHEDULES = {
    "paper": Schedule.paper(LAYERS, min_exit_layer=3, max_exit_layer=6, seq_len=8),
    "even": Schedule.even(LAYERS, (6, 5, 4)),
    "constant": Schedule.constant(LAYERS, 4),
    "random-nested": RANDOM_NESTED,
    "early-termination": Schedule(LAYERS, top_down(LAYERS, 1), (7, 6, 5, 4), name="early-termination"),
    "no-warm-up": Schedule.paper(LAYERS, min_exit_layer=2, max_exit_layer=6, seq_len=6, warmup_layers=0),
}


def tiny_model(model_type: str, *, seed: int = 0, attn_implementation: str | None = None, **changes: Any) -> Any:
    """A random causal LM of the family in fp32, in eval mode; `changes` go into its config."""
    options, std = OPTIONS.get(model_type), 0.2
    if options is None:  # the rounding of recurrent states and of scores of experts grows with the weights
        options, std = shrunk(model_type, LAYERS, VOCAB), 0.1
    config = AutoConfig.for_model(model_type, **(options | changes))
    keywords = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **keywords).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, std)
            elif "norm" not in name.lower() and "ln" not in name.lower():
                parameter.normal_(0, 0.05)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def uneven_model(model_type: str, seed: int = 5, **changes: Any) -> Any:
    """A tiny model whose norms' weights, and biases, are not all alike."""
    model = tiny_model(model_type, seed=seed, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


@cache
def shared_model(model_type: str) -> Any:
    """`tiny_model(model_type)`, made once, for tests that leave the model as it was."""
    return tiny_model(model_type)


def ragged_prompts(lengths: tuple[int, ...] = (9, 4, 7), seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Left-padded prompts (rows, columns) and their attention mask."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    return ids * mask, mask
