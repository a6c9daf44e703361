"""Tiny configs of decoder types of the installed transformers, from their defaults and a table of small sizes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import AutoConfig

_HIDDEN = ("hidden_size", "d_model", "n_embd", "embedding_dim", "lru_width", "mamba_d_ssm")
_MIDDLE = ("intermediate_size", "ffn_dim", "dff", "ffn_hidden_size", "intermediate_size_mlp", "dense_intermediate_size")
_EXPERT = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_experts_intermediate_size",
    "expert_ffn_hidden_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "attention_heads", "swa_num_attention_heads")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
_ONE = ("n_group", "topk_group", "num_expert_group", "n_groups", "mamba_n_groups", "mamba_ngroups", "num_mem_blocks")
_EIGHT = (
    "head_dim",
    "swa_head_dim",
    "v_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_head_dim",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "mamba_chunk_size",
    "chunk_size",
    "d_rel",
    "laurel_rank",
    "hidden_size_per_layer_input",
    "altup_rank",
)
_SIZES: dict[str, Any] = {
    **dict.fromkeys(_HIDDEN, 32),
    **dict.fromkeys(_MIDDLE, 48),
    **dict.fromkeys(_EXPERT, 24),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(_EIGHT, 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size"), 6),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(("kv_lora_rank", "mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "q_lora_rank": 24,
    "vocab_size_per_layer_input": None,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "attn_scale": 0.1,
    "rel_extent": 16,
    "first_k_dense_replace": 1,
}


def shrunk(model_type: str, layers: int, vocabulary: int) -> dict[str, Any]:
    """Options for `AutoConfig.for_model` that make a tiny model with all features of the type's default config."""
    default = AutoConfig.for_model(model_type).to_dict()
    sizes = _SIZES | dict.fromkeys(_LAYERS, layers)
    sizes |= dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), vocabulary)
    lists = {name for name, value in default.items() if isinstance(value, list) and len(value) == _depth(default)}
    if default.get("kv_lora_rank"):  # latent attention: as many keys as queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    found = {name: value for name, value in sizes.items() if name in default and default[name] is not None}
    # Left out, a list with one value a layer is made anew by the config's own rule for so many layers.
    return {name: value for name, value in found.items() if name not in lists} | deepcopy(SPECIAL.get(model_type, {}))


def _depth(default: dict[str, Any]) -> int:
    return next((int(default[name]) for name in _LAYERS if name in default), 0)


# What the table of sizes cannot say. Layers of two kinds stand in patterns that schedules cut in several ways.
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2}
_LENT = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"] * 2,
    "num_kv_shared_layers": 3,
}
_LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "bamba": {"attn_layer_indices": [2, 6]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "falcon_h1": {"mamba_d_head": 8},
    "gemma3n_text": _LENT | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 8},
    "gemma4_text": _LENT,
    "gemma4_unified_text": _LENT,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": 2},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 4},
    "kimi_linear": _LINEAR,
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "lfm3": _CONV,
    "mamba2": {"head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
        "time_step_min": 1e-9,
    },
    "olmo_hybrid": _LINEAR | {"linear_num_value_heads": 2},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 4,
        "time_step_min": 1e-9,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 4, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
