#!/usr/bin/env bash
# Guess: saving the same tensors and the same metadata twice gives the same bytes.
# Instead: metadata of more than one entry is written in a random order, so the file's digest differs from save to save. Without metadata the bytes are equal.
# Versions: safetensors 0.8.0.
# Users should: compare tensors instead of file digests, or keep one metadata entry (a JSON text) when a cache or a signature needs stable bytes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3.11 -m venv venv
venv/bin/pip install -qq --no-compile 'safetensors==0.8.0' 'numpy==2.4.6'
venv/bin/python - <<'EOF'
import hashlib
from importlib.metadata import version

import numpy
from safetensors.numpy import save

print("safetensors", version("safetensors"))
tensors = {"x": numpy.ones((2, 3)), "y": numpy.zeros(4)}
counts = {}
for name, metadata in (("no metadata", None), ("one entry", {"a": "1"}), ("six entries", {key: key for key in "abcdef"})):
    counts[name] = len({hashlib.sha256(save(tensors, metadata)).hexdigest() for _ in range(12)})
    print(f"{name}: {counts[name]} different files from 12 saves of the same tensors")
assert counts["no metadata"] == counts["one entry"] == 1 < counts["six entries"], "the behaviour has changed"
EOF
