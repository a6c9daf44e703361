"""What a run leaves behind: a directory that `from_pretrained` loads and that carries the schedule.

All weights, or a merged adapter: a transformers checkpoint with the schedule in `config.json` (key `skipdecode`). An
adapter alone: a PEFT directory with the schedule in `skipdecode.json`. The tokenizer lies beside it in both cases.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from skipdecode.models.loading.hub import SCHEDULE_FILE
from skipdecode.schedule import Schedule

__all__ = ["merge_adapter", "save_tuned"]

_ADAPTER_WEIGHTS = "adapter_model.safetensors"


def save_tuned(
    model: Any,
    tokenizer: Any,
    schedule: Schedule,
    directory: Path,
    *,
    base_name: str | None = None,
    state_dict: dict[str, Any] | None = None,
    adapter_dtype: str = "float32",
) -> None:
    """Write a tuned model; the directory is there whole or not at all.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        Of a PeftModel only the adapter is written.
    tokenizer : PreTrainedTokenizerBase or None
        Written beside it.
    schedule : Schedule
        What the model was tuned for.
    directory : Path
        Replaced if it exists.
    base_name : str, optional
        How an adapter's file names its base model: a hub id, a directory, or a name that `load_model` takes.
    state_dict : dict, optional
        The weights, where they are not the model's own (gathered from several devices).
    adapter_dtype : {"float32", "float16"}
        Numbers of an adapter's file.
    """
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if hasattr(model, "get_base_model"):
        if base_name is not None:
            model.active_peft_config.base_model_name_or_path = base_name
        state = model.state_dict() if state_dict is None else state_dict
        dtype = getattr(torch, adapter_dtype)
        adapter = {name: tensor.to(dtype) for name, tensor in state.items() if "lora_" in name}
        model.save_pretrained(partial, state_dict=adapter, save_embedding_layers=False)
        (partial / SCHEDULE_FILE).write_text(schedule.to_json(indent=1) + "\n", encoding="utf-8")
        (partial / "README.md").unlink(missing_ok=True)  # PEFT's card, an empty form
    else:
        model.config.skipdecode = schedule.to_dict()
        model.save_pretrained(partial, state_dict=state_dict)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def merge_adapter(model: Any, directory: Path) -> Any:
    """The plain model with the adapter that `save_tuned` wrote to `directory` merged in.

    `model` is the PeftModel it came from, whose own adapter weights are replaced.
    """
    import peft
    from safetensors.torch import load_file

    peft.set_peft_model_state_dict(model, load_file(directory / _ADAPTER_WEIGHTS))
    return model.merge_and_unload()
