#!/usr/bin/env bash
# Guess: prefill_chunk_size changes memory and time of a prefill, not its logits, as it does for a padded batch of a llama.
# Instead: in a hybrid (qwen3_next) a chunk of one token is taken for a decoding step, so the recurrent layers read left padding as text. Chunks of 4 are right.
# Versions: transformers 5.23.0, torch 2.13.0, no kernel packages.
# Users should: choose chunks of two tokens or more, and a prompt length that leaves no chunk of one token inside the padding, or run rows alone.
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

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             eos_token_id=None, bos_token_id=1, pad_token_id=0)
hybrid = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2,
              moe_intermediate_size=16, shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"] * 2)
text = torch.arange(3, 23)[None]
padded = torch.cat([torch.zeros(1, 12, dtype=torch.long), text], 1)
print("transformers", transformers.__version__, "torch", torch.__version__)
for kind, extra in (("llama", {}), ("qwen3_next", hybrid)):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **extra)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(weight, 0, 0.2)
    with torch.no_grad():
        alone = model(text).logits[:, -1]
    gap = {}
    for size in (None, 4, 1):
        out = model.generate(padded, attention_mask=(padded != 0).long(), max_new_tokens=1, do_sample=False, output_logits=True,
                             return_dict_in_generate=True, **({"prefill_chunk_size": size} if size else {}))
        gap[size] = (out.logits[0] - alone).abs().max().item()
    print(kind, "left-padded row against the row alone, by prefill_chunk_size:", {size: f"{value:.1g}" for size, value in gap.items()})
    assert gap[None] < 1e-3 and gap[4] < 1e-3 and (gap[1] > 0.01) == (kind == "qwen3_next"), "the behaviour has changed"
EOF
