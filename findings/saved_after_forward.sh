#!/usr/bin/env bash
# Guess: an eval forward under no_grad leaves the weights as they are.
# Instead: the first eval forward of RWKV divides weights of later layers in place (rescale_every=6). Only a forward in train mode takes it back. A model saved after an eval forward and loaded again is divided twice.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: run one forward in train mode before save_pretrained or state_dict, or set rescale_every=0 before the first forward.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
print("transformers", transformers.__version__, "torch", torch.__version__)
model = RwkvForCausalLM(RwkvConfig(vocab_size=97, hidden_size=32, attention_hidden_size=32, intermediate_size=64, num_hidden_layers=12, context_length=64))
for weight in model.parameters():
    if weight.ndim == 2:
        torch.nn.init.normal_(weight, 0, 0.2)
text = torch.arange(3, 13)[None]
gap = {}
with torch.no_grad():
    logits = model.eval()(text).logits
    for name, mode in (("eval", model.eval), ("train", model.train)):
        mode()
        if name == "train":
            model(text)
        model.save_pretrained(name)
        gap[name] = (RwkvForCausalLM.from_pretrained(name).eval()(text).logits - logits).abs().max().item()
        print(f"saved after a forward in {name} mode: logits of the loaded copy differ by {gap[name]:.2g}")
assert gap["eval"] > 0.1 and gap["train"] < 1e-4, "the behaviour has changed"
EOF
