#!/usr/bin/env bash
# Guess: among equal largest logits argmax, topk(1), topk(2) and sort name the same token first.
# Instead: argmax and topk(1) take the lowest id, topk(2) takes a higher one first. Ties are common with bfloat16 logits, so a greedy token differs from the first of top-k or the best beam.
# Versions: torch 2.13.0 on a CPU.
# Users should: sort with stable=True, or compare logits instead of token ids where two ways of decoding must agree.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'numpy==2.4.6'
venv/bin/python - <<'EOF'
import torch

print("torch", torch.__version__)
logits = torch.zeros(50000, dtype=torch.bfloat16)
logits[[10, 20, 49000]] = 1
first = {
    "argmax": logits.argmax().item(),
    "topk(1)": logits.topk(1).indices[0].item(),
    "topk(2)": logits.topk(2).indices[0].item(),
    "sort": logits.sort(descending=True).indices[0].item(),
    "stable sort": logits.sort(descending=True, stable=True).indices[0].item(),
}
print("ids 10, 20 and 49000 are tied; first id by", first)
assert first["argmax"] == first["topk(1)"] == first["stable sort"] == 10 != first["topk(2)"], "the behaviour has changed"
EOF
