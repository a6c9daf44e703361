"""The checkpoints of a run, from which a killed run goes on exactly; its recipe, its log, the names of what it writes.

`recipe.json` lies in the run's directory from its start, so a resumed run can be checked against it, and repeats the
run when it is given to `skipdecode tune --recipe`.

A checkpoint holds trained weights (with LoRA the adapter's), a fit that is trained with them, optimizer, random states,
and how far the run was.
Batches, learning rate and schedule are functions of the step and need no state. Both are written beside their place and
renamed, so a kill leaves what was there before.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skipdecode.common.environment import COMMAND
from skipdecode.common.files import give_usual_mode, write_whole, writing
from skipdecode.common.jsonl import Json, heading, json_line
from skipdecode.common.progress import note
from skipdecode.common.resume import ANEW, differences, other_settings
from skipdecode.data.source import Records
from skipdecode.errors import OutputError, UsageError
from skipdecode.models.fit import fit_of, fit_state
from skipdecode.models.recipe import RECIPE_FILE, RECIPE_FORMAT, RECIPE_KIND, read_recipe

_KEEP = 2
_ADAPTER, _FITTED = "adapter.safetensors", "fit.safetensors"


@dataclass
class RunProgress:
    """How far a run is. `step` counts finished optimizer steps; `clock` are seconds, evaluations included.

    `last_loss` is of the newest evaluation. `begun` is the step at which the initial weights were taken (again), and
    `halvings` says how often that was, each time with half of the learning rate. `is_over`: no further step pays.
    """

    step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    tokens: int = 0
    seconds: float = 0.0
    clock: float = 0.0
    last_loss: float = math.inf
    begun: int = 0
    halvings: int = 0
    is_over: bool = False

    def state_dict(self) -> Json:
        """For accelerate's checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Json) -> None:
        """From accelerate's checkpoint."""
        vars(self).update(state)


class Checkpoints:
    """The checkpoints of one run.

    `accelerator`: its prepared model and optimizer are what is stored. `directory`: where; one directory per
    checkpoint, the last two are kept. `adapter`: the PEFT wrapper whose adapter is stored in place of all weights.
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
            give_usual_mode(partial)
            os.replace(partial, final)
            for old in self._saved()[:-_KEEP]:
                shutil.rmtree(old)
        self._accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Go back to the newest checkpoint that can be read, if there are any.

        Raises OutputError: there are some, and none can be read.
        """
        newest = self._saved()
        for checkpoint in reversed(newest):
            try:
                self._accelerator.load_state(str(checkpoint))
            except Exception as e:  # Of many classes: safetensors', pickle's, torch's and the file system's.
                reason = " ".join(str(e).split())[:200] or type(e).__name__
            else:
                return
            if checkpoint == newest[0]:
                raise OutputError(f"no checkpoint of {self._directory} can be read ({reason}): give another `out`")
            note(f"{checkpoint} cannot be read ({reason}): the run goes on from the checkpoint before")
            self._accelerator.wait_for_everyone()
            if self._accelerator.is_main_process:
                # Not among those that are counted and kept, and there for who wants to look.
                os.replace(checkpoint, checkpoint.with_suffix(".damaged"))

    def remove(self) -> None:
        """Delete all checkpoints: the run is finished."""
        if self._accelerator.is_main_process:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _saved(self) -> list[Path]:
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


CHECKPOINTS, LOG_FILE = "checkpoints", "log.jsonl"


class RunLog:
    """Writes a line that says what the file is, then rows of kind "train" and "dev"; only the main process writes.

    `keep_steps`: rows of later steps are dropped: those that a killed run wrote after its last checkpoint, and that
    come again.
    """

    def __init__(self, directory: Path, *, keep_steps: int, is_main: bool) -> None:
        self._path = directory / LOG_FILE if is_main else Path(os.devnull)
        if is_main:
            rows = [row for row in read_log(self._path) if row["step"] <= keep_steps] if keep_steps else []
            write_whole(self._path, b"".join(map(json_line, [heading("tuning"), *rows])))
        self._file = self._path.open("ab", buffering=0)

    def write(self, kind: str, step: int, values: Json) -> None:
        """One row; it is on its way to the disk when this returns."""
        with writing(self._path):
            self._file.write(json_line({"kind": kind, "step": step, **values}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_log(path: Path) -> list[Json]:
    """The rows of a log; none if there is no file. A last line that a kill cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    # A log that an older version began has no such first line.
    return [row for row in map(json.loads, lines[:-1]) if "step" in row]


_MUST_AGREE = ("options", "prompt", "schedule", "data", "checkpoint")


def make_recipe(entries: Json) -> Json:
    """A recipe of these entries, without result; JSON-ready."""
    recipe = {"kind": RECIPE_KIND, "format": RECIPE_FORMAT, **entries, "command": COMMAND.get(), "result": None}
    # Once through JSON, so that it compares equal to one that was read.
    return dict(json.loads(json.dumps(recipe)))


def data_entry(file: Records, records: int, rejects: int) -> Json:
    """What a recipe says of a data file; its name without the directory, for the digest tells more."""
    name = "-" if file.stream else Path(file.name).name
    return {"file": name, "sha256": file.sha256, "records": records, "skipped": rejects}


def write_recipe(recipe: Mapping[str, Any], directory: Path) -> None:
    """Write `directory`/recipe.json; it is there whole or not at all."""
    write_whole(directory / RECIPE_FILE, json.dumps(recipe, indent=1) + "\n")


def run_in(directory: Path, recipe: Json, *, overwrite: bool) -> Json | None:
    """Return the stored recipe of a directory whose run is that of `recipe`; None if there is no run.

    `overwrite`: also None for a finished run, and for a run with other settings. Otherwise the latter raises a
    UsageError, which names the first difference.
    """
    if not (directory / RECIPE_FILE).is_file():
        return None
    stored = read_recipe(directory / RECIPE_FILE)
    before, now = (
        {"processes": each.get("processes", 1)} | {part: each.get(part) or {} for part in _MUST_AGREE}
        for each in (stored, recipe)
    )
    difference = next(differences(before, now), None)  # other numbers of processes get other batches
    if overwrite and (difference is not None or stored["result"] is not None):
        return None
    if difference is not None:
        raise UsageError(other_settings(directory, difference, stored.get("command", ""), ANEW))
    return stored
