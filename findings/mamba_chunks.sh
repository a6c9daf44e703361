#!/usr/bin/env bash
# Guess: a cache makes it indifferent whether 10 new tokens are fed in one forward or one by one.
# Instead: jamba's Mamba layers read the cached state in a forward of one token only. A longer forward starts them at zero and overwrites the state, so chunked prefill, a second turn and drafts are wrong.
# Mamba, falcon_mamba and zamba share the fault. A qwen3_next is right.
# Versions: transformers 5.23.0, torch 2.13.0, no kernel packages.
# Users should: prefill these types in one forward, set no prefill_chunk_size, and read the whole conversation again at every turn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
kinds = {
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=10, expert_layer_offset=9, num_experts=2, mamba_d_state=8,
                  mamba_dt_rank=4),
    "qwen3_next": dict(head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
                       num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
                       layer_types=["linear_attention", "full_attention"] * 2),
}
text = torch.arange(3, 23)[None]


@torch.no_grad()
def gap(model, pieces):
    cache, logits, start = None, [], 0
    for size in pieces:
        positions = torch.arange(start, start + size)[None]
        out = model(text[:, start:start + size], past_key_values=cache, position_ids=positions, use_cache=True)
        cache, start = out.past_key_values, start + size
        logits.append(out.logits)
    return (torch.cat(logits, 1) - model(text, use_cache=False).logits).abs().max().item()


print("transformers", transformers.__version__, "torch", torch.__version__)
for kind, extra in kinds.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **extra)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(weight, 0, 0.2)
    steps, chunk = gap(model, [10] + [1] * 10), gap(model, [10, 10])
    print(f"{kind}: 10 tokens, then 10 single steps: {steps:.1g}; then one forward of 10: {chunk:.1g}")
    assert steps < 1e-3 and (chunk > 0.1) == (kind == "jamba"), "the behaviour has changed"
EOF
