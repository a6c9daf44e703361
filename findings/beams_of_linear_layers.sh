#!/usr/bin/env bash
# Guess: beam search gives the same text with and without a cache.
# Instead: MiniMax has a cache class of its own, and its reorder_cache leaves the state of the linear attention layers where it was. Beams go on from the state of another beam. A llama is right.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: decode MiniMax greedily or by sampling, or pass use_cache=False with num_beams.
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

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             eos_token_id=None, bos_token_id=1, pad_token_id=0)
linear = dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=8, layer_types=["full_attention", "linear_attention"] * 2)
print("transformers", transformers.__version__, "torch", torch.__version__)
for kind, extra in (("llama", {}), ("minimax", linear)):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **extra)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0, 0.2)
    wrong = greedy = 0
    for _ in range(6):
        prompt = torch.randint(3, 97, (1, 8))
        texts = [[model.generate(prompt, num_beams=beams, max_new_tokens=10, do_sample=False, use_cache=use).tolist() for use in (True, False)]
                 for beams in (1, 3)]
        greedy, wrong = greedy + (texts[0][0] != texts[0][1]), wrong + (texts[1][0] != texts[1][1])
    print(f"{kind}: texts of 6 that the cache changes: greedy {greedy}, three beams {wrong}")
    assert greedy == 0 and (wrong > 0) == (kind == "minimax"), "the behaviour has changed"
EOF
