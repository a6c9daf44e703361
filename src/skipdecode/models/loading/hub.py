"""Loads a model by its name: weights, adapter and tokenizer.

This module does not apply schedules; it only returns the schedule of the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from skipdecode.common.jsonl import read_json
from skipdecode.common.progress import note, without_foreign_bars
from skipdecode.errors import DataError, ModelLoadError, UsageError
from skipdecode.models.carried import GENERATION_FILE, Recipe, carry, keep_tuned, schedule_file, untuned_line
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading.adapter import add_tokens, check_mergeable, put_adapter
from skipdecode.models.loading.base_weights import base_sample, check_base, keep_base_sample, put_fit
from skipdecode.models.loading.ref import LOCAL, ModelRef, told
from skipdecode.models.loading.stored import (
    StoredTensor,
    check_stored,
    check_tensors,
    stored_tensors,
    unused_tensors,
    without_wrappers,
)
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_LONGEST_NAME = 4096
# Without one of these files, transformers either fails or makes an empty tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready for decoding.

    Parameters
    ----------
    model : transformers causal LM or peft.PeftModel
        In eval mode, on its device.
    tokenizer : transformers tokenizer or None
        Pads on the left. The pad token is the end token if the checkpoint names none.
    ref : ModelRef
        The resolved name: schedule, recipe and directory of the checkpoint.
    """

    model: Any
    tokenizer: Any | None
    ref: ModelRef

    @property
    def name(self) -> str:
        """The name by which the model was loaded."""
        return self.ref.name

    @property
    def path(self) -> Path:
        """The directory of the checkpoint; for a hub id, its snapshot in the hub's cache."""
        return self.ref.folder

    @property
    def schedule(self) -> Schedule | None:
        """The schedule of the checkpoint."""
        return self.ref.schedule

    @property
    def recipe(self) -> Recipe | None:
        """The prompt template and the schedules of the tuning; None if the checkpoint has no recipe."""
        return self.ref.recipe

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(decoder_layers(unwrap(self.model)))

    def untuned_line(self, schedules: Iterable[Schedule]) -> str | None:
        """One line for users if weights were not tuned under some of the schedules and no fit has maps, else None."""
        from skipdecode.models.fit import fit_of

        return untuned_line(schedules, self.recipe, self.name, fit=fit_of(self.model))


class _HasModel(Protocol):
    """An LLM, or another object with a loaded model."""

    loaded: LoadedModel


Model = str | Path | ModelRef | LoadedModel | _HasModel
"""A model that is loaded (also an LLM), or a name as for `load`."""


def ref_of(model: Model, schedules: Iterable[object] = ()) -> ModelRef:
    """The resolved name of a model; if it is loaded by name, a fit beside a file of `schedules` is used."""
    loaded = getattr(model, "loaded", model)
    if isinstance(loaded, LoadedModel | ModelRef):
        return loaded.ref if isinstance(loaded, LoadedModel) else loaded
    return ModelRef(checked_name(loaded), schedule_files(schedules))


def schedule_files(schedules: Iterable[object]) -> tuple[str, ...]:
    """The files among schedules, their texts and others: a fit may lie beside them."""
    bases = (base_of(schedule_file(str(one))) for one in schedules if isinstance(one, str | Path))
    return tuple(filter(os.path.isfile, bases))


def checked_name(name: Any) -> str:
    """The name of a model as text; raises UsageError for other objects, and ModelLoadError for a name that is none."""
    if not isinstance(name, str | os.PathLike):
        kind = type(name).__name__
        raise UsageError(f"a model is not accepted as {kind}: give its name or directory, or the result of load to LLM")
    text = str(os.fspath(name))
    if len(os.fsencode(text)) > _LONGEST_NAME:
        raise ModelLoadError(f"model {text[:80]!r}… is not known: no directory and no hub id has so long a name")
    return text


def load_model(
    name: str | Path | ModelRef,
    *,
    dtype: str = "auto",
    device: str | None = None,
    require_tokenizer: bool = True,
) -> LoadedModel:
    """Load a model as `skipdecode.engine.opening.load` does; `dtype` "auto" is the type in the checkpoint."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not accepted: give one of {', '.join(DTYPES)}")
    target = choose_device(device)
    ref = name if isinstance(name, ModelRef) else ModelRef(checked_name(name))
    config = ref.config  # refused first if it is of no decoder
    if ref.adapter is not None:
        check_mergeable(ref.adapter, config)
    recipe, fit = ref.recipe, ref.fit
    for folder in {ref.place, ref.folder}:
        _check_generation_config(folder / GENERATION_FILE)
    tokenizer = _tokenizer(ref, require_tokenizer)
    model = _base_model(ref, dtype, target)
    if ref.adapter is not None:
        add_tokens(model, ref.adapter)
    if recipe is not None:
        keep_tuned(model, recipe.tuned_under)
    if fit is not None:
        near = [file for file in ref.schedule_files if Path(file).expanduser().resolve().parent == fit.parent]
        is_own = ref.own_fit is not None and ref.own_fit.resolve() == fit.resolve()
        put_fit(model, fit, near, ref.fit_digest if is_own else None)
    if ref.adapter is not None:
        sample = base_sample(model)
        check_base(sample, ref.base, ref.adapter, None if recipe is None else recipe.base)
        model = put_adapter(model, ref.adapter, target)
        keep_base_sample(model, sample)
        _take_generation_config(unwrap(model), ref.adapter)
        if ref.schedule is not None:
            carry(model, ref.schedule, ref.fit_digest)
    if tokenizer is not None:
        _complete(tokenizer, model, ref)
    return LoadedModel(model.eval(), tokenizer, ref)


def configured_ends(model: Any) -> list[int]:
    """The end tokens that the generation config of a model names."""
    return _listed(unwrap(model).generation_config.eos_token_id)


def name_ends(model: Any, ends: Iterable[int]) -> list[int]:
    """Add end tokens to the generation config of a model; returns those that it did not name."""
    named = configured_ends(model)
    if new := sorted(set(ends) - set(named)):
        unwrap(model).generation_config.eos_token_id = named + new
    return new


def _listed(tokens: Any) -> list[int]:
    return [int(token) for token in (tokens if isinstance(tokens, list) else [tokens]) if token is not None]


# ---------------------------------------------------------------------- parts


def _tokenizer(ref: ModelRef, required: bool) -> Any | None:
    """The adapter's tokenizer if it has one, else the model's; None if neither has one and it is not `required`."""
    from transformers import AutoTokenizer

    source = ref.folder if ref.adapter is not None and _has_tokenizer(ref.adapter) else ref.place
    if not _has_tokenizer(source):
        if required:
            raise ModelLoadError(f"{ref.name} has no tokenizer: put a tokenizer.json in its directory")
        return None
    with told(ref.name, "its tokenizer does not load"):
        tokenizer = AutoTokenizer.from_pretrained(source, **LOCAL)
    tokenizer.padding_side = "left"
    return tokenizer


def _complete(tokenizer: Any, model: Any, ref: ModelRef) -> None:
    """Name the tokenizer's end token by the configs, and its pad token by the end token, where it names none."""
    if tokenizer.eos_token is None:
        ends = configured_ends(model) or _listed(_config_entry(ref, "eos_token_id"))
        words = (tokenizer.convert_ids_to_tokens(token) for token in ends if 0 <= token < len(tokenizer))
        tokenizer.eos_token = next((word for word in words if word is not None), None)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token


def _config_entry(ref: ModelRef, name: str) -> Any:
    """An entry of config.json; a config object has its class's default where the file has none."""
    stored, _ = type(ref.config).get_config_dict(ref.place, **LOCAL)
    return stored.get(name, (stored.get("text_config") or {}).get(name))


def _check_generation_config(file: Path) -> None:
    """Refuse a generation config that is broken, which transformers leaves out without a word."""
    if file.is_file() and not isinstance(read_json(file), dict):
        raise DataError(f"{file}: a JSON object is needed")


def _take_generation_config(model: Any, adapter: Path) -> None:
    """Give the adapted model the generation config beside the adapter, if there is one."""
    from transformers import GenerationConfig

    if (adapter / GENERATION_FILE).is_file():
        with told(str(adapter), "its generation config does not load"):
            model.generation_config = GenerationConfig.from_pretrained(str(adapter))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / file).is_file() for file in _TOKENIZER_FILES)


def choose_device(device: str | None) -> Any:
    """The torch device of this name, by default the first GPU, else the CPU; raises UsageError for other names."""
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with contextlib.suppress(RuntimeError, AssertionError, NotImplementedError, TypeError):
        if (found := torch.empty(0, device=device).device).type != "meta":  # which holds no weights
            return found
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    gpus += ["mps"] if torch.backends.mps.is_available() else []
    reason = "" if gpus else " (PyTorch finds no GPU)" if torch.version.cuda else " (this PyTorch is a build for CPUs)"
    raise UsageError(f"device {device!r} is not accepted here: give {', '.join(['cpu', *gpus])}{reason}")


def _base_model(ref: ModelRef, dtype: str, device: Any) -> Any:
    """The base model's weights, each of which the checkpoint has in the right shape."""
    from transformers import AutoModelForCausalLM

    where, config = ref.base, ref.config
    with told(where, _not_loaded(config)), without_foreign_bars():
        stored = stored_tensors(ref.place, ref.fetch)
        check_stored(where, stored, ref.config)
        renamed = without_wrappers(stored)
        model, loading = AutoModelForCausalLM.from_pretrained(
            ref.place,
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
        what = (
            "language_model" if any("language" in each for each in renamed) else "_orig_mod, or another wrapper's name,"
        )
        note(f"{where}: {what} is left out of the names of its weights")
        # transformers would write the old names again.
        kept = [one for one in model._weight_conversions if not {*one.source_patterns} <= renamed.keys()]
        model._weight_conversions = kept
    return model


def _check_loaded(where: str, model: Any, stored: Mapping[str, StoredTensor], loading: Mapping[str, Any]) -> None:
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


def _not_loaded(config: Any) -> str:
    """The message on weights that transformers does not load."""
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return "its weights do not load"
    method = (quantized if isinstance(quantized, dict) else quantized.to_dict()).get("quant_method")
    return (
        f"its weights are quantized ({method}) and do not load here: take the checkpoint in bf16, fp16 or fp32 that "
        "they were made from, or dequantize them where they load, and quantization int8 makes small ones"
    )
