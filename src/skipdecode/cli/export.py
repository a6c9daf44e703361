"""Write a model under a schedule as a smaller ordinary model that other tools run: transformers, vLLM, llama.cpp.

Every token must run the same layers, as under a flat schedule whose prompts run the layers of new tokens. The result
has only these layers; an adapter is merged. Its text is the text of this package under the schedule.

--format hf writes a transformers checkpoint with tokenizer and recipe, --format gguf one file for llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from skipdecode.cli.options import NamedModel, ScheduleOptions, choose_schedule
from skipdecode.common.directories import RunDirectory
from skipdecode.common.options import option
from skipdecode.common.progress import note
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.gguf_file import KINDS, check_architecture
from skipdecode.models.loading.hub import DTYPES, LoadedModel, load_model

_SOME_POSITIONS = 64


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, ScheduleOptions):
    """Options of `skipdecode export`."""

    format: str = option(
        "hf: a transformers checkpoint; gguf: one file for llama.cpp", default="hf", choices=("hf", "gguf")
    )
    gguf_type: str = option("with --format gguf: type of the matrices", default="f16", choices=KINDS)
    dtype: str = option(
        "with --format hf: type of the weights; auto is the base model's own", default="auto", choices=DTYPES
    )
    out: str = option("directory for the model", path=RunDirectory("run of skipdecode export", {}))
    overwrite: bool = option(
        "write into a directory with other files, and replace them; a directory that holds a model is refused",
        default=False,
    )


def run(config: Config) -> int:
    """Cut the model to the schedule's layers and write it."""
    from skipdecode.models.loading.export import check_exportable, cut_model, save_checkpoint, save_gguf

    ref, out = config.ref, Path(config.out)
    schedule, origin = choose_schedule(
        config, ref.num_layers, carried=ref.schedule, default_seq_len=_SOME_POSITIONS, named=ref.schedules
    )
    layers = check_exportable(schedule, ref)
    if config.format == "gguf":
        check_architecture(ref.config)
    note(f"schedule {schedule.name}: {origin}")
    loaded = _load(config)
    if (line := loaded.untuned_line([schedule])) is not None:
        note(line)
    cut_model(loaded.model, layers)
    if config.format == "gguf":
        out = save_gguf(loaded, out, config.gguf_type)
    else:
        save_checkpoint(loaded, schedule, out)
    print(f"{out}: {len(layers)} of {schedule.num_layers} layers: {', '.join(map(str, layers))}")
    return 0


def _load(config: Config) -> LoadedModel:
    """The model on the CPU, with an adapter merged in fp32."""
    import torch

    stored = config.ref.config.dtype or torch.float32
    dtype = stored if config.dtype == "auto" else getattr(torch, config.dtype)
    first = dtype if config.ref.adapter is None else torch.float32
    loaded = load_model(
        config.ref, dtype=str(first).removeprefix("torch."), device="cpu", require_tokenizer=config.format == "gguf"
    )
    return replace(loaded, model=merge_adapter(loaded.model).to(dtype))
