"""Checkpoints from which a killed run goes on exactly: trained weights, optimizer, random states, and how far it was.

A checkpoint is written beside its place and renamed, so a kill leaves the one before. With LoRA the adapter alone is
stored. Batches, learning rate and schedule are functions of the step and need no state.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Checkpoints", "Progress"]

_KEEP = 2
_ADAPTER = "adapter.safetensors"


@dataclass
class Progress:
    """How far a run is. `step` counts finished optimizer steps."""

    step: int = 0
    best_step: int = 0
    best_loss: float | None = None
    tokens: int = 0
    seconds: float = 0.0

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
        self.progress = Progress()
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
        self._accelerator.save_state(str(partial))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            for old in self._found()[:-_KEEP]:
                shutil.rmtree(old)
        self._accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Go back to the newest checkpoint; False if there is none."""
        found = self._found()
        if not found:
            return False
        self._accelerator.load_state(str(found[-1]))
        return True

    def remove(self) -> None:
        """Delete all checkpoints: the run is finished."""
        if self._accelerator.is_main_process:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _found(self) -> list[Path]:
        return sorted(p for p in self._directory.glob("step-*") if p.is_dir() and p.suffix != ".partial")

    # accelerate's hooks: an entry taken off the list is a model that accelerate neither stores nor loads.

    def _save_adapter(self, models: list[Any], weights: list[Any], directory: str) -> None:
        import peft
        from safetensors.torch import save_file

        if not weights:
            return
        state = peft.get_peft_model_state_dict(self._adapter, state_dict=weights.pop(), save_embedding_layers=False)
        if self._accelerator.is_main_process:
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, Path(directory) / _ADAPTER)

    def _load_adapter(self, models: list[Any], directory: str) -> None:
        import peft
        from safetensors.torch import load_file

        if models:
            models.pop()
            peft.set_peft_model_state_dict(self._adapter, load_file(Path(directory) / _ADAPTER))
