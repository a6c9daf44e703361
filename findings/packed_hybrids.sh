#!/usr/bin/env bash
# Guess: position_ids that restart at 0 keep packed texts apart (as DataCollatorWithFlattening makes them), or the model refuses them.
# Instead: only attention layers find the borders. The convolution and recurrent layers of lfm2 and of every other hybrid carry one text into the next, without an error or a warning.
# Versions: transformers 5.23.0, torch 2.13.0, no kernel packages.
# Users should: pad batches of hybrid models instead of packing them, or pass seq_idx where the kernels that read it are installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

shape = dict(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
kinds = {"llama": {}, "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False}}
texts = [list(range(3, 11)), list(range(11, 23))]
batch = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": text} for text in texts])
print("transformers", transformers.__version__, "torch", torch.__version__)
print("position_ids", batch["position_ids"].tolist())
for kind, extra in kinds.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **extra)).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0, 0.3)
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[:, 8:]
        alone = model(torch.tensor([texts[1]]), use_cache=False).logits
    gap = (packed - alone).abs().max().item()
    print(f"{kind}: second text packed against alone, logits differ by {gap:.2g}")
    assert (gap > 0.1) == (kind == "lfm2"), "the behaviour has changed"
EOF
