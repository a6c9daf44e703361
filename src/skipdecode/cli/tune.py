"""Fine-tune a model under a schedule, as a LoRA adapter or in all weights.

Each response token runs only the layers of the schedule, so skipped layers cost no time in training either. A response
ends with the tokenizer's end token; with --chat, with the token that the chat template writes behind an answer. The
generation config of the output names this token, so that generation stops there.
If MODEL is a LoRA adapter, that adapter is trained further; with --merge it is merged, and a fresh one is trained.
With --self, no responses are needed: prompts come from a file or are sampled from the model, the model answers them at
full depth, and is then distilled under the schedule and under milder ones. Prompts and answers stay in OUT/self.jsonl,
those held out in OUT/self-dev.jsonl.
After an interruption the same command continues from its last checkpoint.
On several devices: accelerate launch -m skipdecode tune ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import ClassVar

from skipdecode.cli.options import MODEL, NamedModel, PushOptions, ScheduleOptions, TrainingFiles
from skipdecode.common.files import RunDirectory
from skipdecode.common.options import OVERWRITE, Reads, option
from skipdecode.generation.self_generated import ABOUT_FILE, LOG_FILE
from skipdecode.learning.settings import TuneOptions
from skipdecode.models.loading.checkpoint import model_files
from skipdecode.models.recipe import RECIPE_FILE

_PICTURE = "loss.png"
_DIRECTORY = RunDirectory("run of skipdecode tune", {RECIPE_FILE: "options", ABOUT_FILE: "settings", LOG_FILE: ""})


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, TrainingFiles, TuneOptions, ScheduleOptions, PushOptions):
    ONE_OF: ClassVar = (("model", "recipe"), ("train", "self", "recipe"), ("out",))
    NEEDS: ClassVar = ScheduleOptions.NEEDS
    EXCLUDES: ClassVar = TuneOptions.EXCLUDES

    model: str = option(MODEL, default="", positional=True, path=Reads(model_files))
    out: str = option("directory for the tuned model, its recipe and the log", default="", path=_DIRECTORY)
    overwrite: bool = option(OVERWRITE, default=False)
    recipe: str | None = option(
        "use the options of a recipe.json, except for those on the command line", default=None, path=Reads()
    )
    json: bool = option("print one JSON document", default=False)


def run(config: Config) -> int:
    """Tune, draw the losses, and print the result."""
    from skipdecode.evaluation.pictures import loss_chart, save_charts
    from skipdecode.learning.checkpoint import LOG_FILE, read_log
    from skipdecode.learning.trainer import process_state
    from skipdecode.learning.tune import tune

    config.push()
    tuned = tune(
        config.model,
        config.train,
        config.dev or None,
        out=config.out,
        schedule=config.schedule,
        seq_len=config.seq_len,
        recipe=config.recipe,
        base=config.base,
        overwrite=config.overwrite,
        **{field.name: getattr(config, field.name) for field in fields(TuneOptions) if field.name in config.given},
    )
    if process_state().is_main_process:
        title = f"{tuned.recipe['options']['model']}, tuned for {tuned.schedule.name}"
        save_charts([loss_chart(read_log(tuned.path / LOG_FILE), title)], tuned.path / _PICTURE)
        print(json.dumps(tuned.recipe) if config.json else tuned)
        config.push(tuned.path)
    return 0
