#!/usr/bin/env bash
# Guess: in eval mode a forward without a cache is a function of its input, whatever was run before.
# Instead: with dynamic NTK rotary positions a text of exactly max_position_embeddings tokens keeps the frequencies of a longer text that was run earlier. One token less resets them.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: run a short text before a text of exactly that length, or choose the text length of an evaluation one below max_position_embeddings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2,
    max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})).eval()
print("transformers", transformers.__version__, "torch", torch.__version__)
long = torch.randint(3, 97, (1, 40))
gap = {}
with torch.no_grad():
    for length in (15, 16):
        text = torch.randint(3, 97, (1, length))
        before = model(text).logits
        model(long)
        gap[length] = (model(text).logits - before).abs().max().item()
        print(f"{length} tokens, before and after a text of 40 tokens: logits differ by {gap[length]:.2g}")
assert gap[15] == 0 and gap[16] > 0.1, "the behaviour has changed"
EOF
