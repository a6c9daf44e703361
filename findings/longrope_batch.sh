#!/usr/bin/env bash
# Guess: a row of a batch with correct mask and position_ids has the output that the row has alone.
# Instead: longrope (Phi-3 long context) chooses short or long factors once per forward, by the largest position in the batch. One long row changes the output of every short row.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: group texts so that no batch has rows on both sides of original_max_position_embeddings.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from transformers import Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
model = Phi3ForCausalLM(Phi3Config(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    eos_token_id=None, bos_token_id=1, pad_token_id=0, max_position_embeddings=64, original_max_position_embeddings=16, rope_parameters=rope)).eval()
short = torch.randint(3, 97, (1, 8))


@torch.no_grad()
def beside(length):
    rows = torch.zeros(2, length, dtype=torch.long)
    rows[0, -8:], rows[1] = short, torch.randint(3, 97, (length,))
    mask = torch.ones_like(rows)
    mask[0, :-8] = 0
    return model(rows, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[0, -1]


print("transformers", transformers.__version__, "torch", torch.__version__)
with torch.no_grad():
    alone = model(short).logits[0, -1]
gap = {length: (beside(length) - alone).abs().max().item() for length in (12, 24)}
print("last logits of a row of 8 tokens, alone against beside a row of 12 or 24 tokens:", gap)
assert gap[12] < 1e-3 and gap[24] > 0.1, "the behaviour has changed"
EOF
