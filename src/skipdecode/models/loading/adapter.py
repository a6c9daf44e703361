"""A PEFT adapter: on its base model, fresh for tuning, and merged into the weights."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from skipdecode.common.progress import without_foreign_bars
from skipdecode.common.types import Device, PeftConfig, PeftModel, PretrainedConfig, PreTrainedModel, Tensor
from skipdecode.errors import ModelLoadError, UsageError
from skipdecode.models.checkpoint_schedule import ADAPTER_FILE
from skipdecode.models.families import check_adapter, unwrap
from skipdecode.models.loading.stored import (
    StoredTensor,
    check_stored,
    check_tensors,
    header,
    library_errors,
    one_line,
    without_numbers,
)

_FILES = ("adapter_model.safetensors", "adapter_model.bin")
# Initial values for which PEFT changes the base, at each loading by other data or random numbers.
_NOT_REPEATED = ("corda", "loftq", "pissa_niter")
_MERGE = "add `merge`, which merges it and tunes a fresh one"
_EQUAL = 0.02  # of the standard deviation of logits; in fp32, merges of all types differ by 4e-5 at most


def check_mergeable(adapter: Path, config: PretrainedConfig) -> None:
    """Refuse an adapter in a directory that cannot be merged into a base model of this config; reads no weights.

    Raises AttachError, ModelLoadError: the message names the adapter's type.
    """
    import peft
    import torch

    with (
        library_errors(str(adapter), f"its {ADAPTER_FILE} is none that peft {peft.__version__} reads"),
        _without_warnings(),
    ):
        settings = peft.PeftConfig.from_pretrained(str(adapter))
    check_adapter(settings)
    for name, value in vars(settings).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelLoadError(f"{adapter}: {name} is {value} in its {ADAPTER_FILE}: a number is needed")
    initial = str(getattr(settings, "init_lora_weights", ""))
    if initial.startswith(_NOT_REPEATED):
        raise ModelLoadError(
            f"{adapter}: with init_lora_weights {initial!r} PEFT changes the base model anew at each loading: save the "
            "adapter as an ordinary LoRA (path_initial_model_for_weight_conversion of peft's save_pretrained)"
        )
    if getattr(settings, "lora_bias", False) or settings.peft_type == "BEFT":  # the base must have a bias to add to
        with torch.device("meta"), library_errors(str(adapter), _not_merged(settings)), _without_warnings():
            peft.PeftModel(without_numbers(config), settings).merge_and_unload()


def put_adapter(model: PreTrainedModel, adapter: Path, device: Device) -> PeftModel:
    """A PeftModel of the model and an adapter in a directory, in eval mode; raises ModelLoadError if they differ."""
    import peft

    with (
        library_errors(str(adapter), "the adapter does not go on its base model"),
        without_foreign_bars(),
        _without_warnings(),
    ):
        settings = peft.PeftConfig.from_pretrained(str(adapter))
        settings.inference_mode = True
        kind = peft.MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(settings.task_type, peft.PeftModel)
        # Adapter weights in the base's dtype: this is for decoding, where mixed dtypes only cost casts.
        in_dtype_of_base = {"autocast_adapter_dtype": False}
        adapted = kind(model, settings, **in_dtype_of_base)
        # Not by PeftModel.from_pretrained, which does not return the tensors that did not fit.
        result = adapted.load_adapter(
            str(adapter), adapted.active_adapter, torch_device=str(device), **in_dtype_of_base
        )
        tensors = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        stored = _stored(adapter)
    # With a grown vocabulary PEFT saves a trained copy of a module twice, and loads it by the shorter name.
    shorter = {name: name.replace(".modules_to_save.", ".") for name in result.unexpected_keys}
    unexpected = {name for name, short in shorter.items() if short == name or short not in stored}
    state = adapted.state_dict(keep_vars=True)
    loaded = {id(tensor) for name, tensor in state.items() if name not in result.missing_keys}
    missing = {name for name in result.missing_keys if id(state.get(name)) not in loaded}  # some types share tensors
    indices = {name for name, tensor in tensors.items() if not tensor.is_floating_point()}
    check_stored(str(adapter), {name: tensor for name, tensor in stored.items() if name not in indices})
    check_tensors(str(adapter), tensors.items(), missing=missing, unexpected=unexpected)
    return adapted.eval()


def _stored(adapter: Path) -> dict[str, StoredTensor]:
    """The tensors in an adapter's file."""
    file = next((path for name in _FILES if (path := adapter / name).is_file()), None)
    if file is None:
        raise ModelLoadError(f"{adapter} has no {' or '.join(_FILES)}, the adapter's weights: put the file there")
    return header(file)


def add_tokens(model: PreTrainedModel, adapter: Path) -> None:
    """Give a base model as many rows of embeddings as an adapter in a directory was made with.

    Raises ModelLoadError: the adapter's file does not hold all rows, so that the added ones are unknown.
    """
    with library_errors(str(adapter), "the adapter's weights do not load"):
        stored = _stored(adapter)
        settings = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: f"base_model.model.{name}" for name, module in model.named_modules()}
    complete = {
        (module, tensor.shape[0])
        for module in (names[table], names[head])
        for name in (f"{module}.weight", f"{module}.base_layer.weight")
        if (tensor := stored.get(name)) is not None
    }
    parts = {(f"{names[table]}.lora_embedding_A", 1), (f"{names[head]}.lora_B.weight", 0)}
    sizes = {rows for _, rows in complete} | {stored[name].shape[axis] for name, axis in parts if name in stored}
    base_rows = table.weight.shape[0]
    if sizes <= {base_rows}:
        return
    held = {module for module, _ in complete}
    # With one tensor for both, the head has the table's rows, unless PEFT trained a copy of the table.
    copied = any(names[table].endswith(name) for name in settings.get("modules_to_save") or ())
    follows = head.weight is table.weight and (not copied or settings.get("ensure_weight_tying"))
    if len(sizes) > 1 or names[table] not in held or not (names[head] in held or follows):
        raise ModelLoadError(
            f"{adapter}: the adapter was made for {max(sizes)} tokens, its base has {base_rows}, and its file does not "
            "hold the rows of all tokens: save it with peft's save_embedding_layers=True, or make it on a base that "
            "has the added tokens"
        )
    model.resize_token_embeddings(sizes.pop(), mean_resizing=False)


def with_lora(
    model: PreTrainedModel, rank: int, alpha: float | None, dropout: float, targets: Sequence[str]
) -> PeftModel:
    """Wrap the model with a LoRA adapter of PEFT, the model's or a fresh one; only the adapter is trainable.

    `rank` to `targets` are PEFT's, for a fresh adapter; `alpha` None is twice the rank.

    Raises UsageError: the model's own adapter is not a LoRA alone, or `lora_targets` names modules that the model does
    not have.
    """
    import peft

    if hasattr(model, "get_base_model"):
        if (kind := model.active_peft_config.peft_type) != "LORA":
            raise UsageError(f"the adapter is of type {kind.value}, and only LoRA is tuned further: {_MERGE}")
        return _trainable_lora(model, peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    lora = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")  # `merge_adapter` unties them
            return peft.get_peft_model(model, lora)
    except ValueError as error:
        raise UsageError(f"lora_targets {' '.join(targets)}: {error}") from None


def _trainable_lora(model: PeftModel, adapter: Collection[str]) -> PeftModel:
    """A PeftModel whose adapter, tensors of these names, is made trainable, in fp32 as a fresh one."""
    if foreign := sorted(name for name in adapter if "lora_" not in name):
        raise UsageError(
            f"the adapter holds more than LoRA matrices, such as {foreign[0]}, and cannot be tuned further: {_MERGE}"
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def merge_adapter(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The transformers model with the adapter of a PeftModel added to its weights; a plain model as it is.

    A head that shares its tensor with the token embedding gets a tensor of its own if the adapter changes one of the
    two: the adapter's update is for one module, and a merge would put it into both. If both are still equal after the
    merge, the head shares the tensor again; else the config says that it does not.

    Raises UsageError: the adapter cannot be merged, or, in fp32, the merged model has other logits. Part of it may be
    merged by then.
    """
    base = unwrap(model)
    if base is model:
        return model
    refusal, before = _not_merged(model.active_peft_config), _some_logits(base)
    split = _split_head(base)
    try:
        with _without_warnings():
            base = model.merge_and_unload()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as e:
        raise UsageError(f"{refusal}: {one_line(e)}") from None
    if base.dtype.itemsize >= 4 and (_some_logits(base) - before).abs().max() > _EQUAL * before.std():
        raise UsageError(f"{refusal}: the merged model would have other logits")
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if split and head.weight.shape == table.weight.shape and head.weight.equal(table.weight):
        head.weight = table.weight
    if split:
        base.config.tie_word_embeddings = head.weight is table.weight
    return base


def _not_merged(settings: PeftConfig) -> str:
    return f"its adapter, of PEFT's type {settings.peft_type.value}, cannot be merged into the weights"


def _some_logits(model: PreTrainedModel) -> Tensor:
    """The logits of a few tokens, without dropout."""
    import torch

    was_training = model.training
    with torch.inference_mode():
        logits: Tensor = model.eval()(input_ids=torch.arange(4, device=model.device)[None], use_cache=False).logits
    model.train(was_training)
    return logits


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A context without PEFT's warnings, of missing tensors (refused here) and of shared ones (taken apart here)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _split_head(base: PreTrainedModel) -> bool:
    """Give the head a tensor of its own if it shares it with the embedding and PEFT wraps one of the two."""
    from torch.nn import Parameter

    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not any(type(module).__module__.startswith("peft.") for module in (table, head)):
        return False
    shared = {id(parameter) for parameter in table.parameters()}
    split = False
    for module in head.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                setattr(module, name, Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
                split = True
    return split
