"""A PEFT adapter: on its base model, fresh for tuning, and merged into the weights."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skipdecode.common.progress import without_foreign_bars
from skipdecode.errors import ModelLoadError, UsageError
from skipdecode.models.families import unwrap
from skipdecode.models.loading.ref import ADAPTER_FILE, told
from skipdecode.models.loading.stored import StoredTensor, check_stored, check_tensors, header

_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def put_adapter(model: Any, adapter: Path, device: Any) -> Any:
    """A PeftModel of the model and an adapter in a directory, in eval mode; raises ModelLoadError if they differ."""
    import peft

    # Adapter weights in the base's dtype: this is for decoding, where mixed dtypes only cost casts.
    options: dict[str, Any] = {"torch_device": str(device), "autocast_adapter_dtype": False}
    with told(str(adapter), "the adapter does not go on its base model"), without_foreign_bars(), _without_warnings():
        adapted = peft.PeftModel.from_pretrained(model, str(adapter), **options)
        unwrap(adapted)  # refuses prompt learning, whose tensors are not checked as others are
        # Again, as only this returns which tensors did not fit.
        found = adapted.load_adapter(str(adapter), adapted.active_adapter, **options)
        tensors = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
        stored = _stored(adapter)
    # With a grown vocabulary PEFT saves a trained copy of a module twice, and loads it by the shorter name.
    shorter = {name: name.replace(".modules_to_save.", ".") for name in found.unexpected_keys}
    unexpected = {name for name, short in shorter.items() if short == name or short not in stored}
    check_tensors(str(adapter), tensors.items(), missing=found.missing_keys, unexpected=unexpected)
    return adapted.eval()


def _stored(adapter: Path) -> dict[str, StoredTensor]:
    """The tensors in an adapter's file; empty without a file."""
    file = next((path for name in _FILES if (path := adapter / name).is_file()), None)
    return {} if file is None else header(file)


def add_tokens(model: Any, adapter: Path) -> None:
    """Give a base model as many rows of embeddings as an adapter in a directory was made with.

    Raises ModelLoadError: the adapter's file does not hold all rows, so that the added ones are unknown, or holds no
    plain numbers.
    """
    with told(str(adapter), "the adapter's weights do not load"):
        stored = _stored(adapter)
        settings = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
    check_stored(str(adapter), stored)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: f"base_model.model.{name}" for name, module in model.named_modules()}
    whole = {
        (place, tensor.shape[0])
        for place in (names[table], names[head])
        for name in (f"{place}.weight", f"{place}.base_layer.weight")
        if (tensor := stored.get(name)) is not None
    }
    parts = {(f"{names[table]}.lora_embedding_A", 1), (f"{names[head]}.lora_B.weight", 0)}
    found = {rows for _, rows in whole} | {stored[name].shape[axis] for name, axis in parts if name in stored}
    own = table.weight.shape[0]
    if found <= {own}:
        return
    held = {place for place, _ in whole}
    # With one tensor for both, the head has the table's rows, unless PEFT trained a copy of the table.
    copied = any(names[table].endswith(name) for name in settings.get("modules_to_save") or ())
    follows = head.weight is table.weight and (not copied or settings.get("ensure_weight_tying"))
    if len(found) > 1 or names[table] not in held or not (names[head] in held or follows):
        raise ModelLoadError(
            f"{adapter}: the adapter was made for {max(found)} tokens, its base has {own}, and its file does not hold "
            "the rows of all tokens: save it with peft's save_embedding_layers=True, or make it on a base that has the "
            "added tokens"
        )
    model.resize_token_embeddings(found.pop(), mean_resizing=False)


def with_lora(model: Any, rank: int, alpha: float | None, dropout: float, targets: Sequence[str]) -> Any:
    """The model with a LoRA adapter in a PEFT wrapper, its own or a fresh one; only the adapter is trainable.

    `rank` to `targets` are PEFT's, for a fresh adapter; `alpha` None is twice the rank.

    Raises UsageError: the model's own adapter is not a LoRA alone, or `lora_targets` names modules that the model does
    not have.
    """
    import peft

    if hasattr(model, "get_base_model"):
        return _own_lora(model, peft.get_peft_model_state_dict(model, save_embedding_layers=False))
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


def _own_lora(model: Any, adapter: Collection[str]) -> Any:
    """A PeftModel whose adapter, tensors of these names, is made trainable, in fp32 as a fresh one."""
    if foreign := sorted(name for name in adapter if "lora_" not in name):
        raise UsageError(
            f"the adapter holds more than LoRA matrices, such as {foreign[0]}, and cannot be tuned further: add "
            "`merge`, which merges it and tunes a fresh one"
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad:
            weight.data = weight.data.float()
    return model


def merge_adapter(model: Any) -> Any:
    """The transformers model with the adapter of a PeftModel added to its weights; a plain model as it is.

    A head that shares its tensor with the token embedding gets a tensor of its own if the adapter changes one of the
    two: the adapter's update is for one module, and a merge would put it into both. If both are still equal after the
    merge, the head shares the tensor again; else the config says that it does not.

    Raises UsageError: the adapter cannot be merged. Part of it may be merged by then.
    """
    base = unwrap(model)
    if base is model:
        return model
    if (merge := getattr(model, "merge_and_unload", None)) is None:
        raise UsageError("its adapter cannot be merged into the weights")
    split = _split_head(base)
    try:
        with _without_warnings():
            base = merge()
    except (ValueError, TypeError, NotImplementedError) as e:
        raise UsageError(f"its adapter cannot be merged into the weights ({e})") from None
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if split and head.weight.shape == table.weight.shape and head.weight.equal(table.weight):
        head.weight = table.weight
    if split:
        base.config.tie_word_embeddings = head.weight is table.weight
    return base


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A context without PEFT's warnings, of missing tensors (refused here) and of shared ones (taken apart here)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _split_head(base: Any) -> bool:
    """Give the head a tensor of its own if it shares it with the embedding and PEFT wraps one of the two."""
    from torch.nn import Parameter

    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not any(type(module).__module__.startswith("peft.") for module in (table, head)):
        return False
    shared = {id(parameter) for parameter in table.parameters()}
    found = False
    for module in head.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared:
                setattr(module, name, Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
                found = True
    return found
