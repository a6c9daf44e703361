"""What a run stores: checkpoints from which a killed run goes on exactly, and the tuned model.

A checkpoint holds trained weights (with LoRA the adapter's), a fit that is trained with them, optimizer, random states,
and how far the run was.
Batches, learning rate and schedule are functions of the step and need no state. Both are written beside their place and
renamed, so a kill leaves what was there before.

The tuned model is a directory that `from_pretrained` loads and that carries the schedule. All weights, or a merged
adapter: a transformers checkpoint with the schedule in `config.json` (key `skipdecode`). An adapter alone: a PEFT
directory with the schedule in `skipdecode.json`. Tokenizer and generation config lie beside it in both cases.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from skipdecode.common.files import writing
from skipdecode.common.progress import note
from skipdecode.errors import OutputError
from skipdecode.models.carried import FIT_FILE, SCHEDULE_FILE, carry, carry_in_config
from skipdecode.models.families import unwrap
from skipdecode.models.fit import Fit, fit_of, fit_state, keep_fit
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.base_weights import base_sample
from skipdecode.models.loading.hub import GENERATION_FILE
from skipdecode.models.loading.saving import save_model, save_tokenizer
from skipdecode.schedule import Schedule

_KEEP = 2
_ADAPTER, _FITTED = "adapter.safetensors", "fit.safetensors"
_PEFT_WEIGHTS = "adapter_model.safetensors"


@dataclass
class RunProgress:
    """How far a run is. `step` counts finished optimizer steps; `clock` are seconds, evaluations included."""

    step: int = 0
    best_step: int = 0
    best_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0
    clock: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """For accelerate's checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From accelerate's checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


class Checkpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
        Its prepared model and optimizer are what is stored.
    directory : Path
        Where; one directory per checkpoint, the last two are kept.
    adapter : PeftModel or None
        The PEFT wrapper whose adapter is stored in place of all weights.
    """

    def __init__(self, accelerator: Any, directory: Path, adapter: Any = None) -> None:
        self._accelerator = accelerator
        self._directory = directory
        self.progress = RunProgress()
        accelerator.register_for_checkpointing(self.progress)
        if adapter is not None:
            self._adapter = adapter
            accelerator.register_save_state_pre_hook(self._save_adapter)
            accelerator.register_load_state_pre_hook(self._load_adapter)

    def save(self) -> None:
        """Store the run as it is after `progress.step` steps."""
        final = self._directory / f"step-{self.progress.step:06d}"
        partial = final.with_suffix(".partial")
        if self._accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        with writing(final):
            self._accelerator.save_state(str(partial))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in self._found()[:-_KEEP]:
                shutil.rmtree(old)
        self._accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Go back to the newest checkpoint that can be read; False if there is none at all.

        Raises OutputError: there are some, and none can be read.
        """
        found = self._found()
        for checkpoint in reversed(found):
            try:
                self._accelerator.load_state(str(checkpoint))
            except Exception as e:  # Of many classes: safetensors', pickle's, torch's and the file system's.
                reason = " ".join(str(e).split())[:200] or type(e).__name__
            else:
                return True
            if checkpoint == found[0]:
                break
            note(f"{checkpoint} cannot be read ({reason}): the run goes on from the checkpoint before")
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                # Not among those that are counted and kept, and there for who wants to look.
                os.replace(checkpoint, checkpoint.with_suffix(".damaged"))
        if found:
            raise OutputError(f"no checkpoint of {self._directory} can be read ({reason}): give another `out`")
        return False

    def remove(self) -> None:
        """Delete all checkpoints: the run is finished."""
        if self._accelerator.is_main_process:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _found(self) -> list[Path]:
        return sorted(p for p in self._directory.glob("step-*") if p.is_dir() and not p.suffix)

    # accelerate's hooks: an entry taken off the list is a model that accelerate neither stores nor loads.

    def _save_adapter(self, models: list[Any], weights: list[Any], directory: str) -> None:
        import peft
        from safetensors.torch import save_file

        if not weights:
            return
        own, fitted = fit_state(weights.pop())
        state = peft.get_peft_model_state_dict(self._adapter, state_dict=own, save_embedding_layers=False)
        if self._accelerator.is_main_process:
            folder = Path(directory)
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / _ADAPTER)
            if fitted:
                save_file({name: tensor.contiguous() for name, tensor in fitted.items()}, folder / _FITTED)

    def _load_adapter(self, models: list[Any], directory: str) -> None:
        import peft
        from safetensors.torch import load_file

        if models:
            models.pop()
            peft.set_peft_model_state_dict(self._adapter, load_file(Path(directory) / _ADAPTER))
            if (fitted := Path(directory) / _FITTED).is_file() and (fit := fit_of(self._adapter)) is not None:
                fit.load_state_dict(load_file(fitted))


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
    """Write a tuned model, with the fit that it was tuned with; the directory is there whole or not at all.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        A PeftModel's adapter is written alone.
    tokenizer : PreTrainedTokenizerBase or None
        Written beside the weights.
    directory : Path
        Replaced if it exists.
    base_name : str, optional
        How an adapter's file names its base model: a hub id, a directory, or a name that `load_model` takes.
    state_dict : dict, optional
        The weights, where they are not the model's own (gathered from several devices).
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
            model.active_peft_config.base_model_name_or_path = base_name
        carry(model, schedule, digest)
        state = model.state_dict() if state_dict is None else state_dict
        dtype = getattr(torch, adapter_dtype)
        adapter = {name: tensor.to(dtype) for name, tensor in state.items() if "lora_" in name}
        with writing(directory / _PEFT_WEIGHTS, sum(tensor.nbytes for tensor in adapter.values())):
            model.save_pretrained(partial, state_dict=adapter, save_embedding_layers=False)
        save_tokenizer(tokenizer, partial, shown=directory)
        schedule.save(partial / SCHEDULE_FILE)
        # It may name another end than the base's; unchecked, as transformers saves no config that it finds odd.
        unwrap(model).generation_config.to_json_file(partial / GENERATION_FILE)
        (partial / "README.md").unlink(missing_ok=True)  # PEFT's card, an empty form
    else:
        carry_in_config(model.config, schedule, digest)
        save_model(model, tokenizer, partial, state_dict=state_dict, shown=directory)
    shutil.rmtree(directory, ignore_errors=True)
    os.replace(partial, directory)


def merge_saved(model: Any, directory: Path) -> Any:
    """The plain model with the adapter that `save_tuned` wrote to `directory` merged in, and the fit beside it.

    `model` is the PeftModel it came from, whose own adapter weights and fit are replaced.
    """
    import peft
    from safetensors.torch import load_file

    peft.set_peft_model_state_dict(model, load_file(directory / _PEFT_WEIGHTS))
    if (file := directory / FIT_FILE).is_file():
        keep_fit(model, Fit.load(file))
    return merge_adapter(model)
