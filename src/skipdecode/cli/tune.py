"""Fine-tune a model under a schedule, as a LoRA adapter or in all weights.

Each response token runs only the layers of the schedule, so skipped layers cost no time in training either. A response
ends with the tokenizer's end token; with --chat, with the token that the chat template writes behind an answer. The
generation config of the output names this token, so that generation stops there.
If MODEL is a LoRA adapter, that adapter is trained further; with --merge it is merged, and a fresh one is trained.
With --self, no responses are needed: prompts come from a file or are sampled from the model, the model answers them at
full depth, and is then distilled under the schedule and under milder ones. Prompts and answers stay in OUT/self.jsonl,
those held out in OUT/self-dev.jsonl.
On several devices: accelerate launch -m skipdecode.cli tune ...
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.cli.arguments import flag
from skipdecode.cli.options import MODEL, NamedModel, ScheduleChoice, ScheduleOptions, choose_schedule
from skipdecode.cli.options.records import (
    RecordOptions,
    encode_file,
    make_template,
    read_files,
    self_template,
    with_self_generated,
)
from skipdecode.cli.retired import refuse_retired
from skipdecode.common.directories import RunDirectory
from skipdecode.common.environment import environment
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.data.prompts import Example, RecordFile
from skipdecode.data.records import Template
from skipdecode.data.source import PromptSource
from skipdecode.engine.loading import load
from skipdecode.errors import MissingExtraError, UsageError
from skipdecode.models.carried import RECIPE_FILE
from skipdecode.models.families import vocabulary_size
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.base_weights import base_entry, checkpoint_digest
from skipdecode.models.loading.hub import LoadedModel, name_ends
from skipdecode.models.loading.recipe import read_recipe, stored_recipe
from skipdecode.models.loading.ref import model_files
from skipdecode.schedule import Schedule
from skipdecode.tuning.config import TuneConfig
from skipdecode.tuning.curriculum import make_curriculum
from skipdecode.tuning.recipe import check_same_run, data_entry, make_recipe, write_recipe
from skipdecode.tuning.run_log import CHECKPOINTS, LOG_FILE, read_log
from skipdecode.tuning.self_generated import (
    ABOUT_FILE,
    DEV_FILE,
    TRAIN_FILE,
    SelfGeneratedOptions,
    open_prompts,
)

if TYPE_CHECKING:
    from skipdecode.tuning.trainer import Tuner

_SCHEDULE_OPTIONS = tuple(f.name for f in fields(ScheduleOptions))
_PICTURE = "loss.png"
_DIRECTORY = RunDirectory("run of skipdecode tune", {RECIPE_FILE: "options", ABOUT_FILE: "settings"})
_SOME_POSITIONS = 64  # until the responses are read
_FRESH_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
# Of recipes of earlier versions: these options change nothing.
_RETIRED = ("curriculum_fraction", "tensorboard")
_NOT_IN_RECIPE = ("train", "dev", "out", "resume", "recipe", "json")
# Self-generated data can only teach what full depth does; milder schedules lose very little there.
_SELF_DEFAULTS = {"distill_weight": 1.0, "curriculum": "sampled", "sampled_speedups": (1.0, 1.25)}
_SELF_SPEEDUP = 1.5


@dataclass(frozen=True, kw_only=True)
class Config(NamedModel, TuneConfig, SelfGeneratedOptions, RecordOptions, ScheduleOptions):
    """Options of `skipdecode tune`."""

    NEEDS: ClassVar = ScheduleOptions.NEEDS
    EXCLUDES: ClassVar = (
        ScheduleOptions.EXCLUDES | RecordOptions.EXCLUDES | {"self": ("train", "dev", "response_field")}
    )

    model: str = option(MODEL, default="", positional=True, path=Reads(model_files))
    train: str = option("JSONL or CSV file of training records", default="", path=Reads())
    dev: str = option("JSONL or CSV file of records that select the best weights", default="", path=Reads())
    out: str = option("directory for the tuned model, its recipe and the log", default="", path=_DIRECTORY)
    resume: bool = option("continue from the last checkpoint in --out, if there is one", default=False)
    recipe: str | None = option(
        "use the options of a recipe.json, except for those on the command line", default=None, path=Reads()
    )
    json: bool = option("print one JSON document", default=False)
    train_records: int | None = option("use only the first N lines of --train", default=None, least=1)
    dev_records: int | None = option(
        "use only the first N lines of --dev; with --self, hold out at most N records", default=256, least=1
    )

    @property
    def goes_on(self) -> bool:
        """Whether the model is an adapter that is tuned further, on its own base."""
        return self.ref.adapter is not None and not (self.full or self.merge)


def prepare_parser(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Set the options of `--recipe` as defaults, and the defaults for --self."""
    if "--self" in arguments:
        parser.set_defaults(**_SELF_DEFAULTS)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--recipe")
    path = early.parse_known_args(arguments)[0].recipe
    if path is None:
        return
    recipe = read_recipe(Path(path))
    options = _current(recipe["options"])
    known = {f.name for f in fields(Config)} - set(_NOT_IN_RECIPE)
    if unknown := sorted(set(options) - known):
        refuse_retired("tune", flag(unknown[0]))
        raise UsageError(f"recipe {path}: unknown option {unknown[0]!r}; accepted are {', '.join(sorted(known))}")
    if recipe.get("schedule") is not None:
        # The recipe has the schedule itself: the file may have been deleted or changed.
        options = {k: v for k, v in options.items() if k not in _SCHEDULE_OPTIONS}
    for action in parser._actions:  # as `set_defaults`, which does not accept an option named `self`
        action.default = options.get(action.dest, action.default)


def run(config: Config) -> int:
    """Tune, save, and print the result."""
    prompts = open_prompts(config)
    _check(config)
    files = {} if config.self else _files(config, make_template(config))
    from skipdecode.tuning.setup import process_state

    out, state = Path(config.out), process_state()
    options = {k: v for k, v in asdict(config).items() if k not in _NOT_IN_RECIPE}
    if config.self:
        config, template, made = _self_generated(config, prompts)
        files = _files(config, template)
    else:
        template, made = make_template(config), {}
    loaded, digest = _load(config)
    examples = {name: encode_file(config, template, loaded, name, file) for name, file in files.items()}
    _name_ends(loaded, examples["train"][0])
    schedule, origin = _schedule(config, [len(example.response) for example in examples["train"][0]])
    note(f"schedule {schedule.name}: {origin}")
    data = {name: data_entry(files[name], len(e), bad) for name, (e, bad) in examples.items()} | made
    under = loaded.ref.place.folder() if config.goes_on else loaded.path
    base, processes = base_entry(loaded.model, under), state.num_processes
    about = {"checkpoint": digest, "base": base, "processes": processes}
    recipe = make_recipe(options, template, schedule, data, environment(), **about)
    if config.resume and (stored := stored_recipe(out)) is not None:
        check_same_run(stored | {"options": _current(stored["options"])}, recipe)
        if stored.get("result") is not None:
            if state.is_main_process:
                _finish_again(config, stored, out)
            return 0
    tuner = _tuner(config, loaded, examples["train"][0], examples["dev"][0], schedule, out)
    state.wait_for_everyone()
    if state.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        write_recipe(recipe, out)
    result = tuner.run(resume=config.resume, record=lambda done: write_recipe(recipe | {"result": done.to_dict()}, out))
    if state.is_main_process:
        _show(config, recipe | {"result": result.to_dict()}, out)
    return 0


def _current(options: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's options without those that earlier versions had and that change nothing."""
    return {
        name: value
        for name, value in options.items()
        if name not in _RETIRED and (name, value) != ("augment_names", [])
    }


def _name_ends(loaded: LoadedModel, examples: Sequence[Example]) -> None:
    """Have the tuned model's generation config name the tokens that end the learned responses."""
    if new := name_ends(loaded.model, {example.response[-1] for example in examples}):
        words = ", ".join(map(repr, loaded.tokenizer.convert_ids_to_tokens(new)))  # type: ignore[union-attr]
        note(f"responses end with {words}, which the generation config did not name: the tuned model's names it")


def _finish_again(config: Config, recipe: dict[str, Any], out: Path) -> None:
    """What comes after the result of a run, which a kill may have cut off."""
    note(f"{out} has a finished run: its result is shown again")
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    _show(config, recipe, out)


def _show(config: Config, recipe: dict[str, Any], out: Path) -> None:
    """Draw and print a run by its recipe, which has the result."""
    from skipdecode.reporting.charts import save_charts
    from skipdecode.reporting.plots import loss_chart

    schedule = Schedule.from_dict(recipe["schedule"])
    title = f"{config.model}, tuned for {schedule.name}"
    save_charts([loss_chart(read_log(out / LOG_FILE), title)], out / _PICTURE)
    print(json.dumps(recipe) if config.json else _summary(recipe["result"], schedule, out))


def _check(config: Config) -> None:
    """Refuse wrong options before weights are loaded."""
    for name in ("model", "out") if config.self else ("model", "train", "dev", "out"):
        if not getattr(config, name):
            raise UsageError(f"{'MODEL' if name == 'model' else flag(name)} is missing: see skipdecode tune --help")
    _schedule(config, [_SOME_POSITIONS])  # refuses what does not fit the model
    _check_fit(config)
    if config.self:
        self_template(config)
    else:
        make_template(config)
    if not config.full and find_spec("peft") is None:
        raise MissingExtraError("tuning a LoRA adapter (not needed with --full)", "tune")
    if config.goes_on and (given := [n for n in _FRESH_LORA if getattr(config, n) != getattr(Config, n)]):
        raise UsageError(
            f"{config.model} is an adapter, which is tuned further: leave out {flag(given[0])}, or add --merge, which "
            "merges it and tunes a fresh one"
        )
    try:
        import skipdecode.tuning.setup  # noqa: F401
    except ImportError:
        raise MissingExtraError("tuning", "tune") from None


def _files(config: Config, template: Template) -> dict[str, RecordFile]:
    """The records of --train and --dev; each file is read once."""
    return read_files(config, template, train=config.train_records, dev=config.dev_records)


def _self_generated(config: Config, prompts: PromptSource | None) -> tuple[Config, Template, dict[str, Any]]:
    """The config with self-generated data as records, the template, and the entry of the recipe."""
    from skipdecode.tuning.setup import process_state

    state = process_state()
    state.wait_for_everyone()
    with state.main_process_first():  # other processes use its result
        loaded = load(config.ref)
        # Refused before texts are generated.
        make_curriculum(_schedule(config, [config.self_tokens]).schedule, config)
        files = {"train": TRAIN_FILE, "dev": DEV_FILE}
        config, template, made = with_self_generated(config, loaded, prompts, config.dev_records or 0, **files)
    return config, template, {"self": made}


def _tuner(
    config: Config, loaded: LoadedModel, train: list[Example], dev: list[Example], schedule: Schedule, out: Path
) -> Tuner:
    from skipdecode.tuning.trainer import Tuner

    here = not config.goes_on and Path(config.model).expanduser().is_dir()
    base = str(loaded.path.resolve()) if here else config.ref.base
    if config.base is not None and Path(base).expanduser().is_dir():
        base = str(Path(base).expanduser().resolve())
    return Tuner(loaded.model, loaded.tokenizer, train, dev, schedule, config, out, base_name=base)


def _load(config: Config) -> tuple[LoadedModel, dict[str, Any]]:
    """The model, whose adapter is merged unless it is tuned further, and the digest of the loaded files."""
    import torch

    # Trained weights are fp32; mixed precision is for the forward pass. The base of a LoRA keeps its type.
    as_stored = not config.full and config.precision != "fp32" and torch.cuda.is_available()
    loaded = load(config.ref, dtype="auto" if as_stored else "float32")
    digest = checkpoint_digest(loaded)
    if digest["fit"] is not None:
        note(f"the fit is {'trained with the weights' if config.train_fit else 'not trained'}")
    if not config.goes_on:
        return replace(loaded, model=merge_adapter(loaded.model)), digest
    rows, known = vocabulary_size(loaded.model), config.ref.config.get_text_config(decoder=True).vocab_size
    if rows != known:
        raise UsageError(
            f"the adapter was made for {rows} tokens and its base has {known}: an adapter with embeddings cannot be "
            "tuned further; add --merge, which merges it and tunes a fresh one"
        )
    return loaded, digest


def _check_fit(config: Config) -> None:
    """Refuse a recipe's run without the fit that it started from."""
    before = None if config.recipe is None else read_recipe(Path(config.recipe)).get("checkpoint")
    if config.ref.fit is None and (before or {}).get("fit") is not None:
        raise UsageError(
            f"the run of {config.recipe} started from a fit, and there is none: give --schedule with the file beside "
            "the fit"
        )


def _schedule(config: Config, lengths: Sequence[int]) -> ScheduleChoice:
    """The schedule of the options or the recipe; positions by default: the 95th percentile of `lengths`."""
    ref, layers = config.ref, config.ref.num_layers
    longest = sorted(lengths)[round(0.95 * (len(lengths) - 1))]
    stored = read_recipe(Path(config.recipe)).get("schedule") if config.recipe is not None else None
    carried, own = ref.schedule, ""
    if stored is not None:
        carried, own = Schedule.from_dict(stored), "the recipe's"
    elif config.self and not (config.schedule or config.nominal_speedup or (carried and not carried.is_full)):
        even = Schedule.even(layers, round(layers / _SELF_SPEEDUP))
        carried = replace(even, name="", family="unified", speedup=_SELF_SPEEDUP)
        own = "evenly spaced layers, because no schedule was given"
    return choose_schedule(config, layers, carried=carried, own=own, default_seq_len=longest)


def _summary(result: Mapping[str, Any], schedule: Schedule, out: Path) -> str:
    lines = [
        f"tuned for {schedule.name} (nominal {schedule.nominal_speedup:.2f}x): {out}",
        "dev cross-entropy {best_dev_loss:.4f} at step {best_step} of {steps}".format_map(result),
        "{tokens_per_s:.0f} tokens/s over {tokens} tokens in {precision}".format_map(result),
    ]
    if (speed := result["speed"]) is not None:
        lines.append(
            "forward and backward on the same batches: {tokens_per_s:.0f} tokens/s, {full_depth_tokens_per_s:.0f} at "
            "full depth ({ratio:.2f}x)".format_map(speed)
        )
    return "\n".join(lines)
