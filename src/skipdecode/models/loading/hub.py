"""Loads a model by its name: weights, adapter and tokenizer.

This module does not apply schedules; it only returns the schedule of the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from skipdecode.common.jsonl import Json, read_json
from skipdecode.common.progress import note, without_foreign_bars
from skipdecode.common.types import Device, PretrainedConfig, PreTrainedModel, Tokenizer
from skipdecode.errors import DataError, ModelLoadError, UsageError
from skipdecode.models.checkpoint_schedule import GENERATION_FILE, record_tuned_under, store_in_adapter
from skipdecode.models.families import unwrap
from skipdecode.models.loading import smollm2
from skipdecode.models.loading.adapter import add_tokens, check_mergeable, put_adapter
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, open_checkpoint
from skipdecode.models.loading.stored import (
    LOCAL,
    StoredTensor,
    check_stored,
    check_tensors,
    library_errors,
    stored_tensors,
    unused_tensors,
    without_wrappers,
)
from skipdecode.models.loading.weights_sample import base_sample, check_base, keep_base_sample

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Without one of these files, transformers either fails or makes an empty tokenizer.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "tekken.json", "vocab.json", "vocab.txt"),
    *("spiece.model", "sentencepiece.bpe.model"),
)


def load_model(
    name: str | Path | Checkpoint, *, dtype: str = "auto", device: str | None = None, require_tokenizer: bool = True
) -> LoadedModel:
    """Load a model as `skipdecode.engine.opening.load` does; `dtype` "auto" is the type in the checkpoint."""
    from skipdecode.models.fit import set_fit

    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not accepted: give one of {', '.join(DTYPES)}")
    target = choose_device(device)
    checkpoint = open_checkpoint(name)
    adapter = checkpoint.adapter
    config = checkpoint.config  # refused first if it is of no decoder
    if adapter is not None:
        check_mergeable(adapter, config)
    if checkpoint.base == smollm2.NAME:
        smollm2.fetch()
        checkpoint = replace(checkpoint)  # with the config that was fetched
    for folder in {checkpoint.folder, checkpoint.own_folder}:
        _check_generation_config(folder / GENERATION_FILE)
    tokenizer = _tokenizer(checkpoint, require_tokenizer)
    model = _base_model(checkpoint, dtype, target)
    if adapter is not None:
        add_tokens(model, adapter)
    record_tuned_under(model, checkpoint.tuned_under)
    fit = checkpoint.fit
    if fit is not None:
        set_fit(model, fit.load(model))
    if adapter is not None:
        sample = base_sample(model)
        check_base(sample, checkpoint.base, adapter, checkpoint.recipe.base)
        model = put_adapter(model, adapter, target)
        keep_base_sample(model, sample)
        _take_generation_config(unwrap(model), adapter)
        if checkpoint.schedule is not None:
            store_in_adapter(model, checkpoint.schedule, None if fit is None else fit.digest)
    if tokenizer is not None:
        _complete(tokenizer, model, checkpoint)
    return LoadedModel(model.eval(), tokenizer, checkpoint)


def configured_ends(model: PreTrainedModel) -> list[int]:
    """The end tokens that the generation config of a model names."""
    return _listed(unwrap(model).generation_config.eos_token_id)


def name_ends(model: PreTrainedModel, ends: Iterable[int]) -> list[int]:
    """Add end tokens to the generation config of a model; returns those that it did not name."""
    named = configured_ends(model)
    if new := sorted(set(ends) - set(named)):
        unwrap(model).generation_config.eos_token_id = named + new
    return new


def _listed(tokens: int | list[int] | None) -> list[int]:
    try:
        return [int(token) for token in (tokens if isinstance(tokens, list) else [tokens]) if token is not None]
    except (TypeError, ValueError):
        raise ModelLoadError(f"eos_token_id of the configs is {tokens!r}: give a token id, or a list of them") from None


def _tokenizer(checkpoint: Checkpoint, required: bool) -> Tokenizer | None:
    """The adapter's tokenizer if it has one, else the model's; None if neither has one and it is not `required`."""
    from transformers import AutoTokenizer

    source = next(filter(_has_tokenizer, (checkpoint.own_folder, checkpoint.folder)), None)
    if source is None:
        if required:
            raise ModelLoadError(f"{checkpoint.name} has no tokenizer: put a tokenizer.json in its directory")
        return None
    with library_errors(checkpoint.name, "its tokenizer does not load"):
        tokenizer = AutoTokenizer.from_pretrained(source, **LOCAL)
    tokenizer.padding_side = "left"
    return tokenizer


def _complete(tokenizer: Tokenizer, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Name the tokenizer's end token by the configs, and its pad token by the end token, where it names none."""
    # Read also where the tokenizer has an end token, to refuse what is no token id.
    ends = configured_ends(model) or _listed(checkpoint.entries.get("eos_token_id"))
    if tokenizer.eos_token is None:
        words = (tokenizer.convert_ids_to_tokens(token) for token in ends if 0 <= token < len(tokenizer))
        tokenizer.eos_token = next((word for word in words if word is not None), None)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def _check_generation_config(file: Path) -> None:
    """Refuse a generation config that is broken, which transformers leaves out without a word."""
    if file.is_file() and not isinstance(read_json(file), dict):
        raise DataError(f"{file}: a JSON object is needed")


def _take_generation_config(model: PreTrainedModel, adapter: Path) -> None:
    """Give the adapted model the generation config beside the adapter, if there is one."""
    from transformers import GenerationConfig

    if (adapter / GENERATION_FILE).is_file():
        with library_errors(str(adapter), "its generation config does not load"):
            model.generation_config = GenerationConfig.from_pretrained(str(adapter))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def choose_device(device: str | None) -> Device:
    """The torch device of this name, by default the first GPU, else the CPU; raises UsageError for other names."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.suppress(RuntimeError, AssertionError, NotImplementedError, TypeError):
        if (known := torch.empty(0, device=device).device).type != "meta":  # which holds no weights
            return known
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    gpus += ["mps"] if torch.backends.mps.is_available() else []
    reason = ""
    if not gpus:
        reason = " (PyTorch finds no GPU)" if torch.version.cuda else " (this PyTorch is a build for CPUs)"
    raise UsageError(f"device {device!r} is not accepted here: give {', '.join(['cpu', *gpus])}{reason}")


def _base_model(checkpoint: Checkpoint, dtype: str, device: Device) -> PreTrainedModel:
    """The base model's weights, each of which the checkpoint has in the right shape."""
    from transformers import AutoModelForCausalLM

    where, config = checkpoint.base, checkpoint.config
    with library_errors(where, _not_loaded(config)), without_foreign_bars():
        stored = stored_tensors(checkpoint.folder, checkpoint.fetch)
        check_stored(where, stored, checkpoint.config)
        renamed = without_wrappers(stored)
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            key_mapping=renamed,
            **LOCAL,
        )
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        # The file has a head, whatever its config says: readers of what is saved from here must not leave it out.
        model.config.tie_word_embeddings = False
    model.to(device)
    _check_loaded(where, model, stored, loading)
    if renamed is not None:
        of_language = any("language" in name for name in renamed)
        wrapper = "language_model" if of_language else "_orig_mod, or another wrapper's name,"
        note(f"{where}: {wrapper} is left out of the names of its weights")
        # transformers would write the old names again.
        conversions = [c for c in model._weight_conversions if not {*c.source_patterns} <= renamed.keys()]
        model._weight_conversions = conversions
    return model


def _check_loaded(where: str, model: PreTrainedModel, stored: Mapping[str, StoredTensor], loading: Json) -> None:
    """Refuse weights that are not the model's; a note names those that decoding does not use."""
    unexpected = {*loading["unexpected_keys"]}
    if unused := unused_tensors(unexpected, stored, (name for name, _ in model.named_parameters()), model.config):
        note(f"{where}: {len(unused)} tensors that decoding does not use, such as {min(unused)}, are left out")
    check_tensors(
        where,
        model.named_parameters(),
        missing=loading["missing_keys"],
        unexpected=unexpected - unused,
        mismatched=loading["mismatched_keys"],
    )


def _not_loaded(config: PretrainedConfig) -> str:
    """The message on weights that transformers does not load."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return "its weights do not load"
    method = (quantized if isinstance(quantized, dict) else quantized.to_dict()).get("quant_method")
    return (
        f"its weights are quantized ({method}) and do not load here: take the checkpoint in bf16, fp16 or fp32 that "
        "they were made from, or dequantize them where they load, and quantization int8 makes small ones"
    )
