#!/usr/bin/env bash
# Guess: in a cached step the attention mask is that of the whole text so far, as other decoders want it, and a mask of ones changes nothing.
# Instead: mamba and falcon_mamba multiply the one new token by the whole mask, so their layers run the token once for every column of the text. The logits of the first step are
# right; the state has moved too far, and every later step is wrong. Logits have one column, and nothing is raised.
# Without the mask all steps are right; generate leaves the mask out itself, so only loops of one's own are wrong. mamba2 takes the whole mask.
# Versions: transformers 5.23.0, torch 2.13.0, no kernel packages.
# Users should: pass no mask in cached steps of these two types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'PY'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 4
text = torch.arange(3, 23)[None]
print("transformers", transformers.__version__, "torch", torch.__version__)
shapes = {
    "falcon_mamba": dict(state_size=8),
    "mamba": dict(state_size=8),
    "mamba2": dict(state_size=8, num_heads=8, head_dim=8, n_groups=1),
}
for kind, extra in shapes.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=97, hidden_size=32, num_hidden_layers=4, **extra)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "A_log" not in name:
            torch.nn.init.normal_(weight, 0, 0.2)
    gaps = {}
    with torch.no_grad():
        expected = model(text, use_cache=False).logits[0]
        for masked in (True, False):
            start = text.shape[1] - STEPS
            cache = model(text[:, :start], attention_mask=torch.ones(1, start), use_cache=True).cache_params
            found = []
            for at in range(start, text.shape[1]):
                mask = torch.ones(1, at + 1) if masked else None
                step = model(text[:, at : at + 1], attention_mask=mask, cache_params=cache, use_cache=True).logits
                assert step.shape[1] == 1, "the behaviour has changed"
                found.append((step[0, -1] - expected[at]).abs().max().item())
            gaps[masked] = found
    print(kind, "with the mask:", *(f"{gap:.1g}" for gap in gaps[True]), "; without:", *(f"{gap:.1g}" for gap in gaps[False]))
    assert max(gaps[False]) < 1e-3 and gaps[True][0] < 1e-3, "the behaviour has changed"
    assert (min(gaps[True][1:]) > 0.05) == (kind != "mamba2"), "the behaviour has changed"
PY
