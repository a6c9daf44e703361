"""`skipdecode.export`: a smaller model of the model's own class, with the layers that a schedule of one depth runs.

transformers, vLLM and other tools load the checkpoint as any model of its class.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from skipdecode.common.environment import isolated_torch
from skipdecode.common.files import PARTIAL, RunDirectory, write_whole, writing
from skipdecode.common.progress import note
from skipdecode.common.types import PretrainedConfig, PreTrainedModel
from skipdecode.errors import OptionError, ScheduleError, UsageError
from skipdecode.models.checkpoint_schedule import drop_schedule
from skipdecode.models.families import decoder_layers, find_family
from skipdecode.models.fit import Fit
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.card import EVALUATION_FILE, PICTURE_FILE, write_card
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, Model, open_checkpoint
from skipdecode.models.loading.gguf_file import KINDS, check_architecture, write_gguf
from skipdecode.models.loading.hub import DTYPES, load_model
from skipdecode.models.loading.saving import save_model, save_tuned
from skipdecode.models.recipe import RECIPE_FILE
from skipdecode.schedule import Schedule

_DIRECTORY = RunDirectory("run of skipdecode export", {})
FORMATS = ("auto", "hf", "gguf", "merged")
_SOME_POSITIONS = 64  # of a speed-up; a flat schedule has no use for them
_ONE_VALUE_A_LAYER = (
    *("layer_types", "mlp_layer_types", "attention_layers", "no_rope_layers", "layer_rope_theta"),
    *("num_attention_heads_per_layer", "intermediate_size", "activation_sparsity_pattern"),
)
_COUNTS_FROM_BELOW = ("max_window_layers", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_LISTS_OF_NUMBERS = ("moe_layers", "attn_layer_indices")


@dataclass(frozen=True)
class Exported:
    """The result of `export`.

    Parameters
    ----------
    path : Path
        The directory, or the file for llama.cpp.
    schedule : Schedule
        The schedule whose text the model gives.
    layers : tuple of int
        The layers of the full model that are left.
    """

    path: Path
    schedule: Schedule
    layers: tuple[int, ...]

    def __str__(self) -> str:
        numbers = ", ".join(map(str, self.layers))
        return f"{self.path}: {len(self.layers)} of {self.schedule.num_layers} layers: {numbers}"


@isolated_torch()
def export(
    model: Model,
    out: str | Path,
    schedule: Schedule | str | Path | None = None,
    *,
    format: str = "auto",
    gguf_type: str = "f16",
    dtype: str = "auto",
    overwrite: bool = False,
) -> Exported:
    """Write a model under a schedule as one that other tools run; an adapter is merged.

    Parameters
    ----------
    model : str, Path, LoadedModel or LLM
        A name as for `skipdecode.load`, or a loaded model, whose files are read again.
    out : str or Path
        Directory for the model.
    schedule : Schedule or str, optional
        A schedule under which every token runs the same layers, or its text (`skipdecode.schedule.grammar`), such as
        "2x:flat:pmax_exit". Default: the checkpoint's own. For merged, any schedule.
    format : {"auto", "hf", "gguf", "merged"}
        hf: a smaller transformers checkpoint with tokenizer and recipe; gguf: one file for llama.cpp; merged: a
        checkpoint of all layers with schedule and fit, for this package and its plugin for vLLM; auto: merged if
        prompts alone skip layers, else hf.
    gguf_type : str
        For gguf: type of the matrices, one of `skipdecode.models.loading.gguf_file.KINDS`.
    dtype : str
        For hf: type of the weights; auto: the base model's.
    overwrite : bool
        Write into a directory with other files, and replace them; a directory that holds a model is refused.

    Raises
    ------
    ScheduleError
        Two tokens run different layers; names the nearest schedule of one depth.
    UsageError
        Skipped layers have bridges, a value is not accepted, or llama.cpp does not run the model.
    ModelLoadError, OutputError
        The model cannot be loaded; `out` cannot be written.
    """
    for name, value, known in (("format", format, FORMATS), ("gguf_type", gguf_type, KINDS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise OptionError(name, value, f"one of {', '.join(known)}")
    checkpoint, directory = open_checkpoint(model, schedules=[schedule], dtype=dtype), Path(out)
    chosen = checkpoint.parse(schedule, _SOME_POSITIONS)
    format = _best_format(chosen) if format == "auto" else format
    layers = tuple(range(checkpoint.num_layers)) if format == "merged" else check_exportable(chosen, checkpoint)
    if format == "gguf":
        check_architecture(checkpoint.config)
    if format != "merged" and checkpoint.fit is not None:
        note(f"the fit {checkpoint.fit.file} is left out: the exported layers do not use it")
    _DIRECTORY.check(directory, overwrite=overwrite)
    loaded = _loaded(checkpoint, dtype, require_tokenizer=format == "gguf")
    if (line := loaded.untuned_line([chosen])) is not None:
        note(line)
    directory.mkdir(parents=True, exist_ok=True)
    if format == "merged":
        save_checkpoint(loaded, chosen, directory, all_layers=True)
    else:
        cut_model(loaded.model, layers)
        if format == "gguf":
            return Exported(save_gguf(loaded, directory, gguf_type), chosen, layers)
        save_checkpoint(loaded, chosen, directory)
    for name in (EVALUATION_FILE, PICTURE_FILE) if chosen == checkpoint.schedule else ():
        with suppress(FileNotFoundError):
            shutil.copy(checkpoint.own_folder / name, directory / name)
    write_card(directory, checkpoint, chosen, "export")
    return Exported(directory, chosen, layers)


def possible_formats(name: str, schedule: str | None = None, base: str | None = None) -> list[str]:
    """The formats in which `export` writes a model under a schedule. Reads no weights."""
    checkpoint = open_checkpoint(name, base, [schedule])
    try:
        check_exportable(checkpoint.parse(schedule, _SOME_POSITIONS), checkpoint)
    except (ScheduleError, UsageError):
        return ["merged"]
    with suppress(UsageError):
        check_architecture(checkpoint.config)
        return ["hf", "merged", "gguf"]
    return ["hf", "merged"]


def _best_format(schedule: Schedule) -> str:
    if not schedule.shortens_prompts_alone:
        return "hf"
    note(f"format merged: under {schedule.name} new tokens run every layer, so none can be left out")
    return "merged"


def _loaded(checkpoint: Checkpoint, dtype: str, *, require_tokenizer: bool) -> LoadedModel:
    """The model on the CPU, with an adapter merged in fp32."""
    stored = checkpoint.config.dtype or torch.float32
    wanted = stored if dtype == "auto" else getattr(torch, dtype)
    first = wanted if checkpoint.adapter is None else torch.float32
    name = str(first).removeprefix("torch.")
    loaded = load_model(checkpoint, dtype=name, device="cpu", require_tokenizer=require_tokenizer)
    return replace(loaded, model=merge_adapter(loaded.model).to(wanted))


def check_exportable(schedule: Schedule, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The layers of the smaller model. Reads no weights.

    Raises ScheduleError: two tokens run different layers; names the nearest schedule of one depth; UsageError: skipped
    layers have bridges: no stock class computes those.
    """
    layers = schedule.fixed_layers
    if layers is None:
        falls = f"falls from {schedule.budgets[0]} to {schedule.budgets[-1]} layers"
        differs = f"runs {len(schedule.prompt_layers())} layers on prompts and {schedule.budgets[0]} on new tokens"
        nearest = schedule.flattened().with_prompt("max_exit")
        raise ScheduleError(
            f"schedule {schedule.name!r} {differs if schedule.is_flat else falls}, and an ordinary model runs the same "
            f"layers on every token: the nearest flat schedule runs {nearest.budgets[0]} of {nearest.num_layers} "
            "layers; take it, for the tuning too, with :flat:pmax_exit behind the schedule's name; or keep this one by "
            "the format merged"
        )
    if checkpoint.fit is not None and len(layers) < schedule.num_layers and Fit.load(checkpoint.fit.file).bridges:
        raise UsageError(
            f"the bridges of {checkpoint.fit.file} cannot be exported, as no ordinary model computes them: tune the "
            "base model under the schedule without a fit (with no skipdecode.fit beside the schedule's file)"
        )
    return layers


def cut_model(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Leave only some layers in a transformers causal LM, and correct its config. The result is to be saved, not run.

    Modules keep the layer numbers that they were made with; loading the saved model gives them new ones.
    """
    family = find_family(model)
    if family.numbered:
        raise UsageError(
            f"layers of a {model.config.model_type} model depend on their number, so none can be taken out of a "
            "checkpoint: use the schedule itself"
        )
    path, _, name = family.layers.rpartition(".")
    remaining = nn.ModuleList(decoder_layers(model)[number] for number in layers)
    if getattr(model.config, "scale_attn_by_inverse_layer_idx", False):
        _fold_layer_scale(remaining, layers, model.config)
    setattr(decoder := attrgetter(path)(model), name, remaining)
    if size := getattr(model.config, "hidden_size_per_layer_input", None):  # Gemma 3n and 4: inputs of each layer
        columns = [number * size + column for number in layers for column in range(size)]
        for part, index in ((decoder.embed_tokens_per_layer, 1), (decoder.per_layer_model_projection, 0)):
            part.weight = nn.Parameter(part.weight.data.index_select(index, torch.tensor(columns)))
    _cut_config(model.config, layers)
    with torch.device("meta"):
        states = type(model)(model.config).state_dict(), model.state_dict()
    expected, shapes = ({name: tensor.shape for name, tensor in state.items()} for state in states)
    if expected != shapes:
        raise UsageError(
            f"the config of a {model.config.model_type} model derives the kinds of layers from their numbers, and "
            "cannot name these: use the schedule itself"
        )


def save_checkpoint(loaded: LoadedModel, schedule: Schedule, directory: Path, *, all_layers: bool = False) -> None:
    """Write a model that `cut_model` has cut, its tokenizer, generation config and recipe into a directory.

    With `all_layers` it was not cut, and gets the schedule and its fit.

    The recipe keeps the prompt that the model was tuned on, and says what was exported; without recipe there is none.
    """
    drop_schedule(loaded.model.config)
    with _moved_at_end(directory) as partial:
        if all_layers:
            save_tuned(loaded.model, loaded.tokenizer, schedule, partial)
        else:
            save_model(loaded.model, loaded.tokenizer, partial, shown=directory)
        if (recipe := loaded.checkpoint.document) is not None:
            exported = {"model": loaded.checkpoint.name, "schedule": schedule.to_dict()}
            recipe = {**recipe, "schedule": recipe["schedule"] if all_layers else None, "exported": exported}
            write_whole(partial / RECIPE_FILE, json.dumps(recipe, indent=1) + "\n")


def save_gguf(loaded: LoadedModel, directory: Path, kind: str) -> Path:
    """Write a model that `cut_model` has cut, with its tokenizer, as a file for llama.cpp; returns the file."""
    name = f"{Path(loaded.checkpoint.name).resolve().name}-{kind}.gguf"
    with _moved_at_end(directory) as partial, writing(directory / name):
        write_gguf(loaded.model, partial / name, kind, loaded.tokenizer)
    return directory / name


@contextmanager
def _moved_at_end(directory: Path) -> Iterator[Path]:
    """A directory whose files go into `directory` at the end, config.json last: it makes the directory a model's."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=PARTIAL) as partial:
        yield Path(partial)
        for file in sorted(Path(partial).iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(file, directory / file.name)


def _cut_config(config: PretrainedConfig, layers: tuple[int, ...]) -> None:
    """Correct every entry of a config that counts or lists layers."""
    if (scale := getattr(config, "scale_depth", None)) is not None:  # the class divides it by the root of the depth
        config.scale_depth = scale * (len(layers) / config.num_hidden_layers) ** 0.5
    lists = {name: values for name in _ONE_VALUE_A_LAYER if isinstance(values := getattr(config, name, None), list)}
    _cut_kinds(config, layers)
    config.num_hidden_layers = len(layers)
    for name, values in lists.items():
        with suppress(AttributeError):  # of a property, which follows from other entries
            setattr(config, name, [values[number] for number in layers])
    if hasattr(config, "attention_types"):  # GPT-Neo: the list above is read from this one
        config.attention_types = [[config.attention_layers, 1]]
    for name in _COUNTS_FROM_BELOW:
        if (count := getattr(config, name, None)) is not None:
            setattr(config, name, sum(number < count for number in layers))
    for name in _LISTS_OF_NUMBERS:
        if (numbers := getattr(config, name, None)) is not None:
            setattr(config, name, [index for index, number in enumerate(layers) if number in numbers])
    if hasattr(config, "decoder_sparse_step"):
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        config.mlp_only_layers = [i for i, number in enumerate(layers) if number in dense or (number + 1) % step]
        config.decoder_sparse_step = 1


def _cut_kinds(config: PretrainedConfig, layers: tuple[int, ...]) -> None:
    """Correct values of Gemma 3n and 4 for single layers, and the number of last layers, which read others' keys."""
    if shared := getattr(config, "num_kv_shared_layers", None):
        config.num_kv_shared_layers = sum(number >= config.num_hidden_layers - shared for number in layers)
    if (by_layer := config.to_dict().get("per_layer_config")) is not None:
        config.per_layer_config = {i: by_layer[str(n)] for i, n in enumerate(layers) if str(n) in by_layer}


def _fold_layer_scale(remaining: Any, layers: tuple[int, ...], config: PretrainedConfig) -> None:
    """GPT-2 may divide attention by the layer's number + 1, which is about to change: divide the queries instead."""
    for layer, number in zip(remaining, layers, strict=True):
        for values in (layer.attn.c_attn.weight, layer.attn.c_attn.bias):
            values.data[..., : config.hidden_size] /= number + 1
    config.scale_attn_by_inverse_layer_idx = False
