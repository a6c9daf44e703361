"""Writes a model and its tokenizer so that transformers 4 reads the same model as transformers 5, without a word.

transformers 5 stores rotary positions under one new name, and names classes and entries of a tokenizer that version 4
does not know. Version 4 then takes its defaults: other positions, another start token. The old names are written too.

A tuned model carries its schedule: all weights, or a merged adapter, in `config.json` (key `skipdecode`); an adapter
alone in `skipdecode.json`. Its fit lies beside it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from skipdecode.common.files import give_usual_mode, write_whole, writing
from skipdecode.common.jsonl import Fields, Json
from skipdecode.common.progress import note, without_foreign_bars
from skipdecode.common.types import PeftModel, PreTrainedModel, Tokenizer
from skipdecode.models.checkpoint_schedule import (
    ADAPTER_SCHEDULE_FILE,
    FIT_FILE,
    GENERATION_FILE,
    store_in_adapter,
    store_in_config,
)
from skipdecode.models.families import unwrap
from skipdecode.models.fit import Fit, fit_of, fit_state, set_fit
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.weights_sample import base_sample
from skipdecode.schedule import Schedule

_CONFIG, _WEIGHTS, _TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
_PEFT_WEIGHTS = "adapter_model.safetensors"
# Entries of rotary positions that are not in version 4's `rope_scaling`, and the names that GPT-NeoX has for them.
_BESIDE_SCALING = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_PHI3_SCALING = {"rope_type", "short_factor", "long_factor", "original_max_position_embeddings"}


def save_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer | None,
    directory: Path,
    *,
    state_dict: Mapping[str, Tensor] | None = None,
    shown: Path,
) -> None:
    """Write a transformers causal LM and its tokenizer, if there is one, into a directory.

    `state_dict`: the weights, where they are not the model's own. `shown`: the directory that error messages name,
    where `directory` is a temporary one.

    Raises WriteError: the directory cannot be written, such as because the disk is full.
    """
    weights = {id(tensor): tensor for tensor in (model.state_dict() if state_dict is None else state_dict).values()}
    needed = sum(tensor.nbytes for tensor in weights.values())
    generation = model.generation_config
    try:
        # Saved below, as transformers saves no changed config that it finds odd, such as one of Llama 2.
        model.generation_config = type(generation)()
        with writing(shown / _WEIGHTS, needed), without_foreign_bars():
            model.save_pretrained(directory, state_dict=state_dict)
    finally:
        model.generation_config = generation
    generation.to_json_file(directory / GENERATION_FILE)
    _edit(directory / _CONFIG, with_old_names)
    save_tokenizer(tokenizer, directory, shown=shown)


def save_tuned(
    model: PreTrainedModel | PeftModel,
    tokenizer: Tokenizer | None,
    schedule: Schedule,
    directory: Path,
    *,
    base_name: str | None = None,
    state_dict: dict[str, Tensor] | None = None,
    adapter_dtype: str = "float32",
) -> None:
    """Write a tuned model, with the fit that it was tuned with; the directory is there whole or not at all.

    `model`: a PeftModel's adapter is written alone. `tokenizer`: written beside the weights. `directory`: replaced if
    it exists. `base_name`: how an adapter's file names its base model: a hub id, a directory, or a name that
    `load_model` takes. `state_dict`: the weights, where they are not the model's own (gathered from several devices).
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state_dict, fitted = (None, None) if state_dict is None else fit_state(state_dict)
    digest = None
    if (fit := fit_of(model)) is not None:
        if state_dict is None and not hasattr(model, "get_base_model") and "base" in fit.about:
            fit.about["base"] = base_sample(model)  # other weights than it began with; a merge may add a matrix
        fit.save(partial / FIT_FILE, fitted or None)
        digest = Fit.load(partial / FIT_FILE).digest()  # of the numbers as the file has them
    if hasattr(model, "get_base_model"):
        if base_name is not None:
            name, _, revision = (base_name, "", "") if Path(base_name).exists() else base_name.partition("@")
            model.active_peft_config.base_model_name_or_path = name
            model.active_peft_config.revision = revision or None
        store_in_adapter(model, schedule, digest)
        state = model.state_dict() if state_dict is None else state_dict
        dtype = getattr(torch, adapter_dtype)
        adapter = {name: tensor.to(dtype) for name, tensor in state.items() if "lora_" in name}
        with writing(directory / _PEFT_WEIGHTS, sum(tensor.nbytes for tensor in adapter.values())):
            model.save_pretrained(partial, state_dict=adapter, save_embedding_layers=False)
        save_tokenizer(tokenizer, partial, shown=directory)
        schedule.save(partial / ADAPTER_SCHEDULE_FILE)
        # It may name another end than the base's; unchecked, as in `save_model`.
        unwrap(model).generation_config.to_json_file(partial / GENERATION_FILE)
        (partial / "README.md").unlink(missing_ok=True)  # PEFT's card, an empty form
    else:
        store_in_config(model.config, schedule, digest)
        save_model(model, tokenizer, partial, state_dict=state_dict, shown=directory)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def merge_saved(model: PeftModel, directory: Path) -> PreTrainedModel:
    """The plain model with the adapter that `save_tuned` wrote to `directory` merged in, and the fit beside it.

    `model` is the PeftModel it came from, whose own adapter weights and fit are replaced.
    """
    import peft

    peft.set_peft_model_state_dict(model, load_file(directory / _PEFT_WEIGHTS))
    if (file := directory / FIT_FILE).is_file():
        set_fit(model, Fit.load(file))
    return merge_adapter(model)


def save_tokenizer(tokenizer: Tokenizer | None, directory: Path, *, shown: Path) -> None:
    """Write a tokenizer, if there is one, and give all files of the directory their usual permissions."""
    if tokenizer is not None:
        with writing(shown / _TOKENIZER):
            tokenizer.save_pretrained(directory)
        if hasattr(tokenizer, "backend_tokenizer"):
            _edit(directory / "tokenizer_config.json", _in_plain_class)
    give_usual_mode(directory)


def with_old_names(config: Json) -> Json:
    """The entries of a config.json, and beside them the names under which transformers 4 reads the same values.

    A note says so if version 4 has no names for these values.
    """
    family, old = config["model_type"], {}
    if family == "qwen3_moe" and "num_local_experts" in config:
        old["num_experts"] = config["num_local_experts"]
    if rope := config.get("rope_parameters"):
        main, local = rope.get("full_attention", rope), rope.get("sliding_attention")
        if main is None or main["rope_type"] == "proportional":  # of types that version 4 has not
            return config
        old |= _old_rope(config, main)
        if local is not None:
            has_own_base = family == "gemma3_text"
            if has_own_base:
                old["rope_local_base_freq"] = local["rope_theta"]
            if local["rope_type"] != "default" or not (has_own_base or local["rope_theta"] == main["rope_theta"]):
                note("transformers 4 has no names for the rotary positions of sliding layers in this config.json")
    return config | old


def _old_rope(config: Fields, rope: Fields) -> Json:
    """Version 4's entries for the rotary positions of all layers, or of those with full attention."""
    is_neox = config["model_type"] == "gpt_neox"
    old = {old if is_neox else name: rope[name] for name, old in _BESIDE_SCALING.items() if name in rope}
    if rope["rope_type"] == "default":
        return old
    scaling = {name: value for name, value in rope.items() if name not in _BESIDE_SCALING}
    if rope["rope_type"] == "longrope":
        # Version 4 reads this from the config itself, and there computes the factor from it.
        length = old["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        if config["model_type"] == "phi3" and scaling.keys() <= _PHI3_SCALING:
            scaling = {"type": "longrope"} | {name: rope[name] for name in ("short_factor", "long_factor")}
        elif (factor := rope.get("factor")) is not None:
            grows = max(math.log(factor), 0.0)
            scaling.setdefault("attention_factor", math.sqrt(1 + grows / math.log(length)))
    return old | {"rope_scaling": scaling}


def _in_plain_class(config: Json) -> Json:
    """The entries of a tokenizer_config.json for the class that takes everything from tokenizer.json.

    Version 4 lacks version 5's name of this class, and its other classes put start and end tokens of their own.
    """
    config.pop("backend", None)
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config | {"tokenizer_class": "PreTrainedTokenizerFast"}


def _edit(file: Path, change: Callable[[Json], Json]) -> None:
    """Replace the entries of a JSON file."""
    changed = change(json.loads(file.read_text(encoding="utf-8")))
    write_whole(file, json.dumps(changed, indent=2, sort_keys=True) + "\n")
