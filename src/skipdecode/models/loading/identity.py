"""All of a checkpoint that affects its output: a run continues only if it is unchanged."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from skipdecode.common.jsonl import Json
from skipdecode.models.families import unwrap
from skipdecode.models.loading.checkpoint import LoadedModel
from skipdecode.models.loading.weights_sample import base_sample

_WITHOUT_EFFECT = ("_name_or_path", "transformers_version")  # entries of a config


def checkpoint_digest(loaded: LoadedModel) -> Json:
    """Everything of a checkpoint that affects its output, JSON-ready: a run continues only if this is unchanged."""
    from skipdecode.models.fit import fit_of  # imports torch

    model, tokenizer = unwrap(loaded.model), loaded.tokenizer
    config = {name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT_EFFECT}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary: Any = json.loads(backend.to_str()) if backend is not None else tokenizer and tokenizer.get_vocab()
    for last_call in ("truncation", "padding") if backend is not None else ():
        vocabulary.pop(last_call, None)
    files = sorted(loaded.checkpoint.own_folder.glob("adapter_*"))
    adapter = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    cleaned = getattr(tokenizer, "clean_up_tokenization_spaces", None)
    return {
        "model_weights": base_sample(loaded.model),
        "fit": None if (fit := fit_of(model)) is None else fit.digest(),
        "adapter": _digest(adapter),
        "config": _digest(config),
        "end_tokens": [model.generation_config.eos_token_id, getattr(tokenizer, "eos_token_id", None)],
        "special_tokens": _digest(getattr(tokenizer, "special_tokens_map", None)),
        "tokenizer": _digest([vocabulary, cleaned]),
        "chat_template": _digest(getattr(tokenizer, "chat_template", None)),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
