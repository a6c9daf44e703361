#!/usr/bin/env bash
# Guess: a sliding window of 1 is the smallest case of the rule that holds for 2, 4 and 8.
# Instead: the cache keeps `keys[-(window - 1):]`, for a window of 1 the slice [-0:], which is all keys. Cached decoding attends to old tokens; the forward without a cache does not.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: set use_cache=False for a model with a window of 1, for example when a test shrinks a config.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from transformers import MistralConfig, MistralForCausalLM

prompt = torch.arange(3, 13)[None]
print("transformers", transformers.__version__, "torch", torch.__version__)
gap = {}
for window in (1, 2, 4):
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.2, eos_token_id=None, bos_token_id=1, pad_token_id=0, sliding_window=window)).eval()
    out = model.generate(prompt, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with torch.no_grad():
        full = model(out.sequences, use_cache=False).logits[:, 9:-1]
    gap[window] = (torch.stack(out.logits, 1) - full).abs().max().item()
    print(f"window {window}: largest difference of logits, cached against uncached: {gap[window]:.2g}")
assert gap[1] > 0.1 and gap[2] < 1e-3 and gap[4] < 1e-3, "the behaviour has changed"
EOF
