#!/usr/bin/env bash
# Guess: the cache that generate returns, passed to the next generate with the whole conversation, skips what it has seen, as for a llama.
# Instead: mamba2 returns the cache as past_key_values, takes it as cache_params only, and reads the whole conversation again on top of the state. The next token comes from a text that has the first turn twice.
# Versions: transformers 5.23.0, torch 2.13.0, no kernel packages.
# Users should: pass the last generated token and the new tokens only, or no cache.
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

kinds = {
    "llama": (dict(intermediate_size=64, num_attention_heads=4), "past_key_values"),
    "mamba2": (dict(num_heads=8, head_dim=8, state_size=8, n_groups=1, chunk_size=8), "cache_params"),
}
first, new = torch.arange(3, 23)[None], torch.tensor([[5, 6, 7]])
print("transformers", transformers.__version__, "torch", torch.__version__)
for kind, (extra, argument) in kinds.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, vocab_size=97, hidden_size=32, num_hidden_layers=4, eos_token_id=None, bos_token_id=1, pad_token_id=0, **extra)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(weight, 0, 0.6 if "conv" in name else 0.2)
    settings = dict(max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
    turn = model.generate(first, **settings)
    text = torch.cat([turn.sequences, new], 1)
    cached = model.generate(text, **settings, **{argument: turn.past_key_values})
    gap = (cached.logits[0] - model.generate(text, **settings).logits[0]).abs().max().item()
    print(f"{kind}: second turn with the first turn's cache, logits differ by {gap:.2g}")
    assert (gap > 0.01) == (kind == "mamba2"), "the behaviour has changed"
EOF
