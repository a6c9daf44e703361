#!/usr/bin/env bash
# Guess: a llama has no sliding window, so a `sliding_window` field in its config changes nothing.
# Instead: DynamicCache reads the field and drops old keys. `generate` with the cache forgets the text beyond the window; without the cache it is right.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: remove `sliding_window` from the config of a model whose attention has no window, and compare one long text with use_cache=False.
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

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, initializer_range=0.2,
             eos_token_id=None, bos_token_id=1, pad_token_id=0)
prompt = torch.arange(3, 13)[None]
print("transformers", transformers.__version__, "torch", torch.__version__)
same = {}
for name, extra in (("no field", {}), ("sliding_window=8", {"sliding_window": 8})):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, **extra)).eval()
    cached, uncached = (model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=use)[0, 10:].tolist() for use in (True, False))
    print(name, "| with cache:", cached, "| without:", uncached)
    same[name] = cached == uncached
assert same == {"no field": True, "sliding_window=8": False}, "the behaviour has changed"
EOF
