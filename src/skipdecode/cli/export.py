"""Write a model under a schedule as a smaller ordinary model that other tools run: transformers, vLLM, llama.cpp.

Every token must run the same layers, as under a flat schedule whose prompts run the layers of new tokens. The result
has only these layers; an adapter is merged. Its text is the text of this package under the schedule.

--format hf writes a transformers checkpoint with tokenizer and recipe, --format gguf one file for llama.cpp. --format
merged keeps all layers and any schedule: it merges an adapter, such as that of prepare, for vLLM with the plugin. The
default is hf, or merged where prompts alone skip layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skipdecode.cli.options import SOME_POSITIONS, NamedModel, PushOptions, ScheduleOptions, choose_schedule
from skipdecode.common.files import RunDirectory
from skipdecode.common.options import option
from skipdecode.common.progress import note
from skipdecode.models.loading.gguf_file import KINDS
from skipdecode.models.loading.hub import DTYPES


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, ScheduleOptions, PushOptions):
    format: str = option(
        "hf: a smaller transformers checkpoint; gguf: one file for llama.cpp; merged: all layers with any "
        "schedule and its fit, for this package and its plugin for vLLM; auto: merged if prompts alone skip layers, "
        "else hf",
        default="auto",
        choices=("auto", "hf", "gguf", "merged"),
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
    from skipdecode.models.loading.export import export

    config.push()
    schedule, origin = choose_schedule(config, config.schedule, SOME_POSITIONS)
    note(f"schedule {schedule.name}: {origin}")
    written = {name: getattr(config, name) for name in ("format", "gguf_type", "dtype")}
    print(export(config.checkpoint, config.out, schedule, overwrite=True, **written))  # `claimed` has checked `out`
    config.push(Path(config.out))
    return 0
