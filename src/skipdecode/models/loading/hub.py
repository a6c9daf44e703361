"""Loads a model by its name: weights, adapter and tokenizer.

This module does not apply schedules; it only returns the schedule of the checkpoint.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipdecode.common.progress import without_foreign_bars
from skipdecode.errors import MissingExtraError, ModelLoadError, UsageError
from skipdecode.models.carried import carry, keep_tuned
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.models.loading.base_weights import check_base, put_fit
from skipdecode.models.loading.recipe import Recipe, untuned_line
from skipdecode.models.loading.ref import ModelRef, Place, one_line, told
from skipdecode.schedule import Schedule

__all__ = ["DTYPES", "GENERATION_FILE", "LoadedModel", "choose_device", "configured_ends", "load_model", "name_ends"]

_NAMED_TENSORS = 2
GENERATION_FILE = "generation_config.json"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
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


def load_model(
    name: str | Path | ModelRef,
    *,
    dtype: str = "auto",
    device: str | None = None,
    require_tokenizer: bool = True,
) -> LoadedModel:
    """As `skipdecode.engine.loading.load`, but for `dtype` "auto": the type in the checkpoint."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not accepted: give one of {', '.join(DTYPES)}")
    target = choose_device(device)
    ref = name if isinstance(name, ModelRef) else ModelRef(str(name))
    if ref.adapter is not None and importlib.util.find_spec("peft") is None:
        raise MissingExtraError(f"the adapter {ref.name}", "peft")
    recipe, fit = ref.recipe, ref.fit
    tokenizer = _tokenizer(ref, require_tokenizer)
    model = _base_model(ref, dtype, target)
    if recipe is not None:
        keep_tuned(model, recipe.tuned_under)
    if fit is not None:
        put_fit(
            model, fit, [file for file in ref.schedule_files if Path(file).expanduser().resolve().parent == fit.parent]
        )
    if ref.adapter is not None:
        check_base(model, ref.base, ref.adapter, None if recipe is None else recipe.base)
        model = _with_adapter(model, ref.adapter, target)
        _take_generation_config(unwrap(model), ref.adapter)
        if ref.schedule is not None:
            carry(model, ref.schedule)
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

    own = ref.adapter is not None and _has_tokenizer(ref.adapter)
    source = Place(str(ref.adapter), local_only=True) if own else ref.place
    tokenizer: Any = None
    error: Exception | None = None
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.where, **source.options)
    except (
        Exception
    ) as e:  # Of many classes; what it means is told below: without files a tokenizer is absent, not broken.
        error = e
    if not own and not _has_tokenizer(ref.place.folder()):
        if required:
            raise ModelLoadError(f"{ref.name} has no tokenizer: put a tokenizer.json in its directory") from error
        return None
    if error is not None:
        raise ModelLoadError(f"{source.where}: its tokenizer does not load: {one_line(error)}") from error
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
    stored, _ = type(ref.config).get_config_dict(ref.place.where, **ref.place.options)
    return stored.get(name, (stored.get("text_config") or {}).get(name))


def _take_generation_config(model: Any, adapter: Path) -> None:
    """The generation config beside an adapter, if there is one, is that of the adapted model."""
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
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        raise UsageError(f"device {device!r} is not accepted: {one_line(e)}") from e


def _base_model(ref: ModelRef, dtype: str, device: Any) -> Any:
    """The base model's weights, each of which the checkpoint has in the right shape."""
    from transformers import AutoModelForCausalLM

    place, config = ref.place, ref.config
    with told(place.where, "its weights do not load"), without_foreign_bars():
        model, loading = AutoModelForCausalLM.from_pretrained(
            place.where,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **place.options,
        )
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        # The file has a head, whatever its config says: readers of what is saved from here must not leave it out.
        model.config.tie_word_embeddings = False
    model.to(device)
    _check_tensors(
        place.where,
        model.named_parameters(),
        missing=loading["missing_keys"],
        unexpected=loading["unexpected_keys"],
        mismatched=loading["mismatched_keys"],
    )
    return model


def _with_adapter(model: Any, adapter: Path, device: Any) -> Any:
    import peft

    # Adapter weights in the base's dtype: this is for decoding, where mixed dtypes only cost casts.
    options: dict[str, Any] = {"torch_device": str(device), "autocast_adapter_dtype": False}
    with told(str(adapter), "the adapter does not go on its base model"), without_foreign_bars():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of missing tensors, which are refused below
            adapted = peft.PeftModel.from_pretrained(model, str(adapter), **options)
        # Again, as only this returns which tensors did not fit.
        found = adapted.load_adapter(str(adapter), adapted.active_adapter, **options)
        tensors = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    _check_tensors(str(adapter), tensors.items(), missing=found.missing_keys, unexpected=found.unexpected_keys)
    return adapted.eval()


def _check_tensors(
    where: str,
    tensors: Iterable[tuple[str, Any]],
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]] = (),
) -> None:
    """Raise an error if the loaded weights are not those of the model.

    Parameters
    ----------
    where : str
        The directory or hub id of the weights.
    tensors : iterable of (name, tensor)
        The loaded tensors, which must be finite.
    missing, unexpected : collection of str
        Tensors of the model that the file lacks, and tensors of the file that the model lacks (a config with fewer
        layers, or other names).
    mismatched : collection of (name, shape in the file, shape in the model)

    Raises
    ------
    ModelLoadError
        The message names the first tensors of each fault.
    """
    shapes = {
        name: f"{name} ({tuple(stored)} in the file, {tuple(own)} in the model)" for name, stored, own in mismatched
    }
    faults = {
        "are missing": sorted(missing),
        "are not in the model": sorted(unexpected),
        "have another shape": [shapes[name] for name in sorted(shapes)],
    }
    remedy = "give it the config that these weights were saved with, or fetch it again"
    if not any(faults.values()):
        faults = {"are not finite": sorted(name for name, tensor in tensors if not _is_finite(tensor))}
        remedy = "fetch it again, or tune anew with a lower --learning-rate"
    told = [f"{len(n)} weights {fault}, such as {', '.join(n[:_NAMED_TENSORS])}" for fault, n in faults.items() if n]
    if told:
        raise ModelLoadError(f"{where}: {'; '.join(told)}: {remedy}")


def _is_finite(tensor: Any) -> bool:
    """One pass without a copy; the exact test is for sums that a half-precision type cannot hold."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() < 2:
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
