#!/usr/bin/env bash
# Guess: with one seed, the first 15 numbers of randn(16) are those of randn(15), as with rand.
# Instead: from 16 values on the CPU draws by another method, so every number differs. A seeded noise or a random weight changes with the size of the tensor that holds it.
# Versions: torch 2.13.0 on a CPU.
# Users should: draw a fixed size and cut it, where results must not depend on the batch size.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'numpy==2.4.6'
venv/bin/python - <<'EOF'
import torch

print("torch", torch.__version__)
gap = {}
for name in ("rand", "randn"):
    for size in (15, 16, 32):
        torch.manual_seed(0)
        few = getattr(torch, name)(size - 1)
        torch.manual_seed(0)
        gap[name, size] = (getattr(torch, name)(size)[:-1] - few).abs().max().item()
        print(f"{name}: first {size - 1} numbers of {size} and of {size - 1} differ by {gap[name, size]:.2g}")
assert gap["randn", 15] == 0 < gap["randn", 16] and max(gap["rand", size] for size in (15, 16, 32)) == 0, "the behaviour has changed"
EOF
