#!/usr/bin/env bash
# Guess: a checkpoint that mlx-lm loads gives transformers' log-probabilities in float32; a field of config.json that it cannot follow is refused, as an unknown type of model is.
# Instead: mlx-lm leaves out sliding_window of Mistral, Mixtral and Qwen2, clip_qkv of OLMoE, and hidden_act of llama. Without the fields all of them are equal to transformers. Nothing is said.
# Matters to: whoever measures or serves a model on a Mac: Mistral 7B v0.1 beyond 4,096 tokens is another function there, and a score of it belongs to no published model.
# Versions: mlx-lm 0.32.2, mlx 0.32.4 on a CPU, transformers 5.24.0, torch 2.13.0.
# Users should: compare log-probabilities of one text with transformers, longer than the window, before they trust a type of model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.24.0' 'mlx[cpu]==0.32.4' 'mlx-lm==0.32.2'
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
venv/bin/python - <<'PY' 2> log.txt || { tail -n 5 log.txt; exit 1; }
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
window = {"sliding_window": 4}
CASES = [
    ("mistral", {"sliding_window": None}, window),
    ("mixtral", EXPERTS | {"sliding_window": None}, window),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}, window | {"use_sliding_window": True, "max_window_layers": 1}),
    ("olmoe", EXPERTS, {"clip_qkv": 0.05}),
    ("llama", {}, {"hidden_act": "gelu"}),
]
text = torch.randint(3, 64, (24,), generator=torch.Generator().manual_seed(0)).tolist()
print("mlx-lm", version("mlx-lm"), "mlx", version("mlx"), "transformers", version("transformers"))


def difference(kind, fields):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **fields)).eval().float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
        expected = torch.log_softmax(model(torch.tensor([text]), use_cache=False).logits[0], -1).numpy()
    model.save_pretrained(kind)
    logits = load_model(Path(kind))[0](mx.array([text]))[0].astype(mx.float32)
    return float(np.abs(np.array(logits - mx.logsumexp(logits, -1, keepdims=True)) - expected).max())


for kind, plain, fields in CASES:
    without, with_fields = difference(kind, plain), difference(kind, plain | fields)
    print(f"{kind}: off by {without:.1g} without and by {with_fields:.2g} with {fields}")
    assert without < 1e-3 < 0.05 < with_fields, "the behaviour has changed"
PY
