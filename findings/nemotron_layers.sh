#!/usr/bin/env bash
# Guess: NemotronHConfig(num_hidden_layers=52) describes 52 layers, as in every other config, or the class says that it wants a list of their kinds.
# Instead: it describes 4 layers, without a word. The number has a setter that drops it, and the class warns if "its" number differs from the list, which it reads back from the list. The same for a null list, or none, beside the number.
# bamba, jamba and granitemoehybrid make as many layers as they are told.
# Versions: transformers 5.23.0.
# Users should: give layers_block_type (or hybrid_override_pattern) with one entry for each layer, and compare len(model.model.layers) with the depth they want.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'transformers==5.23.0'
venv/bin/python - <<'EOF'
import logging

import transformers
from transformers import AutoConfig

said = []
handler = logging.Handler()
handler.emit = said.append
transformers.logging.get_logger("transformers").addHandler(handler)
print("transformers", transformers.__version__)
found = {}
for kind in ("bamba", "jamba", "granitemoehybrid", "nemotron_h"):
    config = AutoConfig.for_model(kind, num_hidden_layers=52)
    found[kind] = config.num_hidden_layers
    print(f"{kind}: 52 layers asked, {config.num_hidden_layers} there")
null = AutoConfig.for_model("nemotron_h", num_hidden_layers=52, layers_block_type=None).num_hidden_layers
print("nemotron_h with a null list:", null, "| warnings:", [record.getMessage() for record in said if "num_hidden_layers" in record.getMessage()])
assert found == {"bamba": 52, "jamba": 52, "granitemoehybrid": 52, "nemotron_h": 4}, "the behaviour has changed"
assert null == 4 and not any("num_hidden_layers" in record.getMessage() for record in said), "the behaviour has changed"
EOF
