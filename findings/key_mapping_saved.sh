#!/usr/bin/env bash
# Guess: from_pretrained(key_mapping=...) renames keys once; save_pretrained then writes the model's own names.
# Instead: save_pretrained renames backwards and writes the old prefix again. The saved folder, loaded as usual, has every weight missing and random; only the report in the log says so.
# Versions: transformers 5.23.0, torch 2.13.0.
# Users should: save with safetensors.torch.save_model, or load the saved folder again and check output_loading_info.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
print("transformers", transformers.__version__, "torch", torch.__version__)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.2)
model = LlamaForCausalLM(config).eval()
config.save_pretrained("wrapped")
save_file({f"wrapped.{key}": value.clone() for key, value in model.state_dict().items()}, "wrapped/model.safetensors", metadata={"format": "pt"})
mapped = LlamaForCausalLM.from_pretrained("wrapped", key_mapping={r"^wrapped\.": ""}).eval()
mapped.save_pretrained("saved")
again, info = LlamaForCausalLM.from_pretrained("saved", output_loading_info=True)
text = torch.arange(3, 13)[None]
with torch.no_grad():
    right, wrong = ((other.eval()(text).logits - model(text).logits).abs().max().item() for other in (mapped, again))
names = sorted(load_file("saved/model.safetensors"))
print(f"loaded with the mapping: logits differ by {right:.2g}; saved and loaded again: {wrong:.2g}, {len(info['missing_keys'])} keys missing")
print("names in the saved file:", names[:2])
assert right < 1e-5 and wrong > 0.1 and names[0].startswith("wrapped."), "the behaviour has changed"
EOF
