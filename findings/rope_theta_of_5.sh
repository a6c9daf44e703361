#!/usr/bin/env bash
# Guess: transformers 4.57 reads the config.json that 5.x saves, or refuses it.
# Instead: 5.x saves rope_theta and rope_scaling inside rope_parameters. 4.57 keeps that as an unknown field and takes rope_theta=10000 and no scaling, without an error or a warning. The weights load, long texts are wrong.
# Versions: transformers 4.57.6 reading a config of 5.23.0.
# Users should: write rope_theta and rope_scaling beside rope_parameters in config.json before they hand a model to programs that pin transformers 4.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'transformers==4.57.6'
venv/bin/python - <<'EOF'
import subprocess
import sys

write = """
import transformers
from transformers import LlamaConfig
print("transformers", transformers.__version__, "saves rope_theta 500000 and llama3 scaling")
rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LlamaConfig(max_position_embeddings=131072, rope_parameters=rope | {"original_max_position_embeddings": 8192}).save_pretrained("saved")
"""
read = """
import transformers
from transformers import AutoConfig
config = AutoConfig.from_pretrained("saved")
print("transformers", transformers.__version__, "reads rope_theta", config.rope_theta, "and rope_scaling", config.rope_scaling)
assert config.rope_theta == 10000.0 and config.rope_scaling is None, "the behaviour has changed"
"""
subprocess.run([sys.executable, "-m", "venv", "new"], check=True)
subprocess.run(["new/bin/pip", "install", "-qq", "--no-compile", "transformers==5.23.0"], check=True)
subprocess.run(["new/bin/python", "-c", write], check=True)
subprocess.run([sys.executable, "-c", read], check=True)
EOF
