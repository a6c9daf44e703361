"""The config of a checkpoint, its weights by the headers of their files, and the checks of what a model took from them.

Headers are read before a model is built: a config of more numbers than the files hold would fill the memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

from skipdecode.common.environment import read_in_turn
from skipdecode.common.jsonl import Json
from skipdecode.common.types import PretrainedConfig, PreTrainedModel, Tensor
from skipdecode.errors import ModelLoadError, SkipDecodeError
from skipdecode.models.families import FAMILIES, drop_unread, layer_windows, layers_in

_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000
LOCAL: dict[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Keyword arguments for every ``from_pretrained``: files of a hub are fetched before."""
_FORMATS = ("model.safetensors", "pytorch_model.bin")
_PLAIN = ("F64", "F32", "F16", "BF16")
_NAMED_TENSORS = 2
# Modules that torch wraps around a model, or around parts of it, and that put their name into the names of weights.
_INNER = r"_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
_WRAPPERS = (rf"^(?:(?:module|{_INNER})\.)+", rf"(?:(?:{_INNER})\.)+")

# Value heads of TRL, multi-token prediction, and what reads images or sounds.
_EXTRA_HEADS = (
    r"v_head\.|mtp\.|model\.mtp_layers\.|(model\.)?(vision|visual|audio|embed_vision|embed_audio|multi_modal)"
)
_OF_TEXT = {r"^language_model\.": "", r"^model\.language_model\.": "model."}


@contextmanager
def library_errors(where: str, what: str, error: type[SkipDecodeError] = ModelLoadError) -> Iterator[None]:
    """A context that turns any error of a library into one line of an `error`; `--debug` shows the traceback."""
    try:
        yield
    except SkipDecodeError:
        raise
    except Exception as e:
        raise error(f"{where}: {_pointer(Path(where).expanduser()) or f'{what}: {one_line(e)}'}") from e


def _pointer(folder: Path) -> str | None:
    """The message on a file in a model's directory that is a pointer of git-lfs, and not the file."""
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.is_file() and file.stat().st_size < _LONGEST_POINTER and file.read_bytes().startswith(_POINTER):
            return f"{file.name} is a git-lfs pointer, not the file itself: run 'git lfs pull' there, or fetch it again"
    return None


def one_line(error: Exception) -> str:
    """The text of a library's error, shortened to one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def read_config(where: str, file: Path) -> PretrainedConfig:
    """The transformers config in a config.json; raises an error unless it is of a decoder-only causal LM."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

    with library_errors(where, "its config does not load"):
        config = AutoConfig.from_pretrained(file, **LOCAL)
        config.return_dict = True  # outputs are read by name
        layers_in(config)
    classes = config.architectures or []
    needed = "a decoder-only causal language model is needed"
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{where} is an encoder-decoder ({config.model_type}): {needed}")
    if (text := config.get_text_config(decoder=True)).model_type in FAMILIES and text is not config:
        # The text model of a checkpoint that reads images or sounds too.
        text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
        config, classes = text, []
    if config.model_type not in CAUSAL_LM or (classes and not set(classes) & set(CAUSAL_LM.values())):
        raise ModelLoadError(f"{where} holds {', '.join(classes) or config.model_type}: {needed}")
    if config.model_type in FAMILIES:
        layer_windows(config)
        drop_unread(config)
    return config


def check_values(where: str, values: Json) -> None:
    """Refuse values of a config's JSON that would fill the memory, or fail later without a word about the config."""
    parts = (part for part in (values, values.get("text_config")) if isinstance(part, dict))
    for part in parts:
        for key in LAYER_COUNTS:
            if isinstance(number := part.get(key), int) and not 0 < number <= _MOST_LAYERS:
                raise ModelLoadError(f"{where}: its config has {key} {number}: 1 to {_MOST_LAYERS} are accepted")
    classes = values.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise ModelLoadError(f"{where}: its config has architectures {classes!r}: a list of class names is accepted")


class StoredTensor(NamedTuple):
    """The type, as safetensors names it, and the shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path, fetch: Callable[[list[str]], object]) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name, once `fetch` was asked for their files. Empty if no such file is there."""
    for name in _FORMATS:
        parts = [name]
        if not (folder / name).is_file() and (index := folder / f"{name}.index.json").is_file():
            document = json.loads(index.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or not isinstance(document.get("weight_map"), dict):
                raise ModelLoadError(f"{index} has no weight_map, which names the files of weights: fetch it again")
            parts = sorted({str(part) for part in document["weight_map"].values()})
        fetch(parts)
        if files := [file for part in parts if (file := folder / part).is_file()]:
            return {name: tensor for file in files for name, tensor in header(file).items()}
    return {}


def header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file of weights by name; the file's values are not read."""
    if file.suffix != ".safetensors":
        return _pickled(file)
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
        return {name: StoredTensor(tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()}


def _pickled(file: Path) -> dict[str, StoredTensor]:
    import torch

    kinds = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    try:
        values = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):  # a format without mmap, or none: the loader reads it, or says what is wrong
        return {}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {name: StoredTensor(kinds.get(t.dtype, str(t.dtype)), tuple(t.shape)) for name, t in tensors.items()}


def check_stored(where: str, stored: Mapping[str, StoredTensor], config: PretrainedConfig | None = None) -> None:
    """Refuse files that a model of this config, or an adapter (None), would read wrongly or whose config is too large.

    Raises ModelLoadError: a matrix has a type that transformers would read as plain numbers (integers, or fp8 without
    scales), or the config describes more layers or far more numbers than the files hold.
    """
    _check_types(where, stored, config)
    if config is not None and stored:
        _check_sizes(where, stored, config)


def _check_types(where: str, stored: Mapping[str, StoredTensor], config: PretrainedConfig | None) -> None:
    coded = [name for name, tensor in stored.items() if tensor.dtype not in _PLAIN]
    if _is_quantized(config):
        scaled = {name.rpartition(".")[0] for name in stored if "scale" in name.rpartition(".")[2]}
        coded = [name for name in coded if "F8" in stored[name].dtype and name.rpartition(".")[0] not in scaled]
    elif config is not None:  # an adapter has no other tensors
        coded = [name for name in coded if _is_weight(name, stored[name].shape)]
    if coded:
        raise ModelLoadError(
            f"{where}: {len(coded)} weights are of type {stored[coded[0]].dtype} without the scales that make numbers "
            f"of them, such as {coded[0]}: take the checkpoint in bf16, fp16 or fp32 (quantization int8 "
            "quantizes it after loading)"
        )


def _check_sizes(where: str, stored: Mapping[str, StoredTensor], config: PretrainedConfig) -> None:
    remedy = "give it the config that these weights were saved with, or fetch it again"
    layers, held = layers_in(config), max((number + 1 for _, number, _ in _numbered(stored, config)), default=0)
    if 0 < held < layers:
        raise ModelLoadError(f"{where}: its config has {layers} layers and its weights have {held}: {remedy}")
    numbers = sum(prod(tensor.shape) for tensor in stored.values())
    if not _is_quantized(config) and (needed := without_numbers(config).num_parameters()) > 2 * numbers:
        raise ModelLoadError(
            f"{where}: its config describes a model of {needed:,} numbers and its weights have {numbers:,}: {remedy}"
        )


def _is_quantized(config: PretrainedConfig | None) -> bool:
    return getattr(config, "quantization_config", None) is not None


def _is_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of integers would be read as a weight; old checkpoints store masks and positions too."""
    return not _is_mask(name, shape) and (name.endswith((".weight", ".bias")) or len(shape) == 3)


def _numbered(names: Iterable[str], config: PretrainedConfig) -> Iterator[tuple[str, int, str]]:
    """The names of weights in a layer, each with the layer's number and the rest of the name behind it."""
    family = FAMILIES.get(config.model_type)
    last = "layers" if family is None else family.layers.rpartition(".")[2]
    for name in names:
        if (match := re.search(rf"(?:^|\.){last}\.(\d+)\.(.+)", name)) is not None:
            yield name, int(match[1]), match[2]


def without_numbers(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a config on the device meta: names and shapes of its weights, and no memory for them."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def without_wrappers(stored: Iterable[str]) -> dict[str, str] | None:
    """Patterns that remove wrappers of torch and multimodal models from names of weights, for transformers; or None."""
    for renamed in (dict.fromkeys(_WRAPPERS, ""), _OF_TEXT):
        if any(re.search(pattern, name) for name in stored for pattern in renamed):
            return renamed
    return None


def unused_tensors(
    unexpected: Iterable[str], stored: Mapping[str, StoredTensor], model_names: Iterable[str], config: PretrainedConfig
) -> set[str]:
    """The unexpected tensors that decoding never reads: masks, value heads, prediction heads behind the last layer.

    A layer behind the last one is a prediction head if it has weights that no layer of the model has (`model_names`),
    or if the config counts it; else the config may be wrong.
    """
    unexpected, layers = set(unexpected), layers_in(config)
    ordinary = {rest for _, _, rest in _numbered(model_names, config)}
    behind = [entry for entry in _numbered(unexpected, config) if entry[1] >= layers]
    last = layers + (getattr(config, "num_nextn_predict_layers", None) or 0)
    heads = {number for _, number, rest in behind if number < last or rest not in ordinary}
    unused = {name for name, number, _ in behind if number in heads}
    masks = {name for name in unexpected & stored.keys() if _is_mask(name, stored[name].shape)}
    return unused | masks | {name for name in unexpected if re.match(_EXTRA_HEADS, name)}


def _is_mask(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one of the masks of attention that old releases of transformers stored."""
    last = name.rpartition(".")[2]
    return last in ("masked_bias", "causal_mask") or (last == "bias" and len(shape) > 1)


def check_tensors(
    where: str,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]] = (),
) -> None:
    """Raise an error if the loaded weights are not the model's.

    `where`: the directory or hub id of the weights. `tensors`: the loaded tensors, which must be finite. `missing`,
    `unexpected`: tensors of the model that the file lacks, and tensors of the file that the model lacks (a config with
    fewer layers, or other names). `mismatched`: names with the shapes in the file and in the model.

    Raises ModelLoadError: the message names the first tensors of each fault.
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
    if prefix := _prefix(missing, unexpected):
        remedy = f"save it with names that do not begin with {prefix!r}"
    if not any(faults.values()):
        faults = {"are not finite": sorted(name for name, tensor in read_in_turn(tensors) if not _is_finite(tensor))}
        remedy = "fetch it again, or tune anew with a lower learning rate"
    messages = [
        f"{len(n)} weights {fault}, such as {', '.join(n[:_NAMED_TENSORS])}" for fault, n in faults.items() if n
    ]
    if messages:
        raise ModelLoadError(f"{where}: {'; '.join(messages)}: {remedy}")


def _prefix(missing: Collection[str], unexpected: Collection[str]) -> str:
    """The prefix of the name of each missing tensor in the file; empty if there is none."""
    first = min(missing, default="")
    prefixes = {name.removesuffix(first) for name in unexpected if first and name.endswith(first)}
    return next((prefix for prefix in prefixes if all(prefix + name in unexpected for name in missing)), "")


def _is_finite(tensor: Tensor) -> bool:
    """One pass without a copy; the exact test is for sums that a half-precision type cannot hold."""
    if tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() < 2:
        return True
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
