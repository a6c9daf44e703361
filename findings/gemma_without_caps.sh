#!/usr/bin/env bash
# Guess: a Gemma that CTranslate2's converter takes gives transformers' log-probabilities in float32; what the converter cannot follow is refused by name, as it refuses yarn.
# Instead: it leaves out both soft caps of Gemma 2 (50 and 30 in every released size) and its windows, and of Gemma 3 the linear rope factor of the full attention layers (8 in 4B, 12B and 27B).
# Both also get 1/sqrt(head_dim) in place of query_pre_attn_scalar, which differs in both 27B. Gemma 2 without caps and Gemma 3 without the factor (270M, 1B) are equal to transformers. Nothing is said.
# Matters to: whoever serves an exported Gemma through CTranslate2: scores that were measured elsewhere belong to another function.
# Versions: ctranslate2 4.8.5, transformers 5.23.0, torch 2.13.0.
# Users should: compare log-probabilities of one text with transformers after each conversion; of these, convert only Gemma 3 270M and 1B.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'torch==2.13.0' 'numpy==2.4.6' 'transformers==5.23.0' 'ctranslate2==4.8.5'
export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
venv/bin/python - <<'PY' 2> log.txt || { tail -n 5 log.txt; exit 1; }
from importlib.metadata import version
from pathlib import Path

import ctranslate2
import numpy as np
import torch
from ctranslate2.converters import TransformersConverter
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(93))]
SIZES = {"vocab_size": len(WORDS), "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO = {"num_hidden_layers": 4, "attn_logit_softcapping": None, "final_logit_softcapping": None}
THREE = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
LOCAL, GLOBAL = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
CASES = [
    ("gemma2", TWO, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    ("gemma2", TWO, {"sliding_window": 8}),
    ("gemma2", TWO, {"query_pre_attn_scalar": 18}),
    ("gemma3_text", THREE, {"rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL}}),
    ("gemma3_text", THREE, {"query_pre_attn_scalar": 21}),
]
text = torch.randint(3, len(WORDS), (60,), generator=torch.Generator().manual_seed(0)).tolist()
split = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<pad>")
print("ctranslate2", version("ctranslate2"), "transformers", version("transformers"))
made = 0


def converted(kind, fields):
    """transformers' log-probabilities and the folder of the converted model."""
    global made
    made += 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | fields), dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
        expected = torch.log_softmax(model(torch.tensor([text]), use_cache=False).logits[0], -1).numpy()
    for part in (model, tokenizer):
        part.save_pretrained(f"model{made}")
    TransformersConverter(f"model{made}").convert(f"converted{made}")
    return expected, Path(f"converted{made}")


def difference(kind, fields):
    expected, folder = converted(kind, fields)
    generator = ctranslate2.Generator(str(folder), compute_type="float32", intra_threads=1)
    found = np.array(generator.forward_batch([[WORDS[i] for i in text]], return_log_probs=True))[0]
    return float(np.abs(found - expected).max())


for kind, plain, fields in CASES:
    without, with_fields = difference(kind, plain), difference(kind, plain | fields)
    print(f"{kind}: off by {without:.1g} without and by {with_fields:.2g} with {fields}")
    assert without < 1e-3 < 0.05 < with_fields, "the behaviour has changed"
yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
try:
    converted("llama", {"num_hidden_layers": 2, "rope_parameters": yarn})
except NotImplementedError as refused:
    print("llama with yarn is refused:", str(refused).partition(".")[0])
else:
    raise SystemExit("yarn is not refused any more")
PY
