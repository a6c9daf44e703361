#!/usr/bin/env bash
# Guess: a minor release keeps the kind of value that a layer returns, so a forward hook that takes output[0] goes on working.
# Instead: layers of GPT-J and CodeGen return a tuple in 5.23 and a tensor in 5.24. There output[0] is the first row of the batch, without an error. Bloom still returns a tuple.
# Versions: transformers 5.23.0 and 5.24.0, torch 2.13.0.
# Users should: write `output[0] if isinstance(output, tuple) else output` in every hook and wrapper of a layer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import subprocess
import sys

look = """
import sys, torch, transformers
from transformers import GPTJConfig, GPTJModel
model = GPTJModel(GPTJConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=4, n_positions=32, rotary_dim=4, bos_token_id=1, eos_token_id=2))
seen = []
model.h[0].register_forward_hook(lambda layer, args, output: seen.append(output))
model(torch.arange(3, 15).view(2, 6))
print("transformers", transformers.__version__, type(seen[0]).__name__, "output[0] has shape", tuple(seen[0][0].shape))
assert tuple(seen[0][0].shape) == ((2, 6, 32) if sys.argv[1] == "5.23.0" else (6, 32)), "the behaviour has changed"
"""
for version in ("5.23.0", "5.24.0"):
    subprocess.run([sys.executable, "-m", "pip", "install", "-qq", "--no-compile", f"transformers=={version}"], check=True)
    subprocess.run([sys.executable, "-c", look, version], check=True)
EOF
