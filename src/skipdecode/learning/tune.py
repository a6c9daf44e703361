"""`tune`: from a model and records to a directory with the tuned weights, their schedule, a recipe and a log."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skipdecode.common.environment import environment, isolated_torch, multiplies_bf16
from skipdecode.common.jsonl import Json
from skipdecode.common.options import near
from skipdecode.common.plain import as_records
from skipdecode.common.progress import note
from skipdecode.common.rows import check_streams, dataset_id
from skipdecode.common.types import PreTrainedModel
from skipdecode.data.examples import Example, encode_source, make_template, self_template
from skipdecode.data.prompts import vocabulary_size
from skipdecode.data.source import PromptSource, Records, Source, held_out, read_file
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.opening import load
from skipdecode.errors import UsageError
from skipdecode.generation.llm import LLM
from skipdecode.generation.self_generated import DEV_FILE, TRAIN_FILE, open_prompts, own_answers
from skipdecode.learning.checkpoint import (
    CHECKPOINTS,
    LOG_FILE,
    data_entry,
    make_recipe,
    read_log,
    run_in,
    write_recipe,
)
from skipdecode.learning.goal import seq_len_of
from skipdecode.learning.settings import TuneOptions
from skipdecode.models.checkpoint_schedule import FIT_FILE
from skipdecode.models.fit import Fit, set_fit
from skipdecode.models.loading.adapter import merge_adapter
from skipdecode.models.loading.card import write_card
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, loaded_of, open_checkpoint
from skipdecode.models.loading.fit_file import FitFile
from skipdecode.models.loading.hub import name_ends
from skipdecode.models.loading.identity import checkpoint_digest
from skipdecode.models.loading.weights_sample import base_entry
from skipdecode.models.recipe import read_recipe
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import is_speedup

if TYPE_CHECKING:
    from skipdecode.learning.trainer import Tuner

_SOME_POSITIONS = 64  # until the responses are read
_FRESH_LORA = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
_OWN_SPEEDUP = 1.5  # of own answers without a schedule


@dataclass(frozen=True, repr=False)
class Tuned:
    """The result of `tune`; `skipdecode.load(tuned.path)` loads the tuned model.

    Parameters
    ----------
    path : Path
        The directory of the tuned model, its recipe and its log.
    recipe : mapping
        The content of recipe.json: options, data, schedule, and the result (`skipdecode.learning.trainer.TuneResult`).
    """

    path: Path
    recipe: Json

    @property
    def schedule(self) -> Schedule:
        """The schedule that the model was tuned for."""
        return Schedule.from_dict(self.recipe["schedule"])

    @property
    def result(self) -> Json:
        """Steps, best step, dev loss per response token, tokens and their number per second."""
        return self.recipe["result"]  # type: ignore[no-any-return]

    @property
    def dev_losses(self) -> list[tuple[float, float]]:
        """Minutes of tuning, and the loss per response token of the dev records at that time."""
        rows = read_log(self.path / LOG_FILE)
        minutes = {row["step"]: row["minutes"] for row in rows if row["kind"] == "train"}
        return [(minutes.get(row["step"], 0.0), row["cross_entropy"]) for row in rows if row["kind"] == "dev"]

    def __repr__(self) -> str:
        schedule, result = self.schedule, self.result
        lines = [
            f"tuned for {schedule.name} (nominal {schedule.nominal_speedup:.2f}x): {self.path}",
            "dev cross-entropy {best_dev_loss:.4f} at step {best_step} of {steps}".format_map(result),
            "{tokens_per_s:.0f} tokens/s over {tokens} tokens in {precision}".format_map(result),
        ]
        return "\n".join(lines)


@isolated_torch()
def tune(
    model: str | Path | LoadedModel | LLM | None = None,
    train: Source | None = None,
    dev: Source | None = None,
    *,
    out: str | Path,
    schedule: Schedule | str | Path | None = None,
    seq_len: int | None = None,
    fit: Fit | str | Path | None = None,
    minutes: float | None = None,
    recipe: str | Path | None = None,
    base: str | Path | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Tuned:
    """Train a model under a schedule, as a LoRA adapter or in all weights, and save the best weights on dev records.

    Parameters
    ----------
    model : str, Path, LoadedModel or LLM
        A name as for `skipdecode.load`, or a loaded model, which stays as it is: a copy is trained.
    train, dev : str, Path or records
        Records to learn from, and records that select the best weights: files (JSONL, JSON, Parquet, CSV), lists of
        mappings, or tables (`skipdecode.common.plain.listed`).
        Without `dev`, every tenth record of `train` is held out. With `self=True` there are none: the model answers
        `prompts` (a file; default: drawn from the model) and learns its answers.
    out : str or Path
        The directory of the run.
    schedule : Schedule or str, optional
        The schedule, or its text (`skipdecode.schedule.grammar`). Default: that of the recipe or the checkpoint; with
        `self=True` evenly spaced layers at nominal 1.5x; else full depth.
    seq_len : int, optional
        Positions over which the budgets of a nominal speed-up fall. Default: the 95th percentile of the responses.
    fit : Fit, str or Path, optional
        A fit, its file or its directory. Default: the one beside the schedule file or the checkpoint.
    minutes : float, optional
        Time of the training, in place of `steps`.
    recipe : str or Path, optional
        A recipe.json, whose options are the defaults.
    base : str or Path, optional
        For an adapter that is loaded by name: its base model.
    overwrite : bool
        Begin anew if `out` has a finished run, or a run with other settings. An unfinished run of the same call goes on
        in any case; without `overwrite`, the same call returns the result of a finished run.
    **options
        Other settings of `skipdecode.learning.settings.TuneOptions`; None is not given. The prompt of a record needs
        one of `task`, `prompt_template` and `prompt_field`, and `response_field` unless there is a task.

    Raises
    ------
    UsageError
        Options do not fit together, or `out` has a run with other ones.
    DataError
        Records cannot be read.
    DivergedError
        A loss or gradient is not finite.
    """
    train, dev = as_records(train), as_records(dev)
    stored = None if recipe is None else read_recipe(Path(recipe))
    settings, known = _settings(stored, recipe, {"minutes": minutes, **options})
    if not model and "model" in known:
        model, base = known["model"], base or known.get("base")
    needed = {"model": model, **({} if settings.self else {"train": train}), "out": out and str(out)}
    for name, value in needed.items():
        if not value:
            remedy = ": give records with responses, or `self`" if name == "train" else ""
            raise UsageError(f"`{name}` is missing{remedy}")
    loaded = loaded_of(model or "")
    checkpoint = open_checkpoint(model or "", None if loaded else base or None, [schedule])
    return _Run(settings, checkpoint, loaded, train, dev, Path(out), schedule, seq_len, fit, stored, overwrite).run()


def _settings(stored: Json | None, recipe: str | Path | None, options: Json) -> tuple[TuneOptions, Json]:
    """The settings: those that are given, else those of the recipe; and the recipe's options."""
    names = {field.name for field in fields(TuneOptions)}
    set_options = {name: value for name, value in options.items() if value is not None}
    if unknown := next((name for name in set_options if name not in names), None):
        raise UsageError(f"tune has no option {unknown!r}{near(unknown, names)}")
    known = {} if stored is None else stored["options"]
    if unknown := next((name for name in sorted(known) if name not in {*names, "model", "base"}), None):
        accepted = ", ".join(sorted(names))
        raise UsageError(f"recipe {recipe}: unknown option {unknown!r}; accepted are {accepted}")
    values = {name: value for name, value in known.items() if name in names} | set_options
    if values.get("self"):
        values = TuneOptions.OF_OWN_ANSWERS | values
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return TuneOptions(**values), known


@dataclass(frozen=True)
class _Run:
    """The steps of `tune`; arguments as there."""

    settings: TuneOptions
    checkpoint: Checkpoint
    model: LoadedModel | None
    train: Source | None
    dev: Source | None
    out: Path
    requested: Schedule | str | Path | None
    seq_len: int | None
    fit: Fit | str | Path | None
    recipe: Json | None
    overwrite: bool

    @property
    def continues_adapter(self) -> bool:
        """Whether the model is an adapter that is tuned further, on its own base."""
        return self.checkpoint.adapter is not None and not (self.settings.full or self.settings.merge)

    def run(self) -> Tuned:
        settings, out = self.settings, self.out
        prompts = open_prompts(settings)
        self._check()
        template, files, generated = self._own_answers(prompts) if settings.self else self._records()
        from skipdecode.learning.trainer import process_state  # takes seconds, so wrong usage is refused before

        state = process_state()
        loaded, digest = self._loaded()
        # An own answer may be a token longer when it is read again, and then exceed the context.
        records = replace(settings, bad_records="skip") if settings.self else settings
        examples = {n: encode_source(file, n, template, loaded, records) for n, file in files.items()}
        train, dev = (examples[name][0] for name in ("train", "dev"))
        _name_ends(loaded, train)
        schedule, origin = self._schedule([len(example.response) for example in train])
        note(f"schedule {schedule.name}: {origin}")
        data = {n: data_entry(files[n], len(e), bad) for n, (e, bad) in examples.items()} | generated
        prompt = template.for_tokenizer(loaded.tokenizer).to_dict()
        entries = {"prompt": prompt, "schedule": schedule.to_dict(), "data": data, "checkpoint": digest}
        recipe = self._recipe(loaded, entries | {"processes": state.num_processes})
        before = run_in(out, recipe, overwrite=self.overwrite)
        if before is not None and before["result"] is not None:
            note(f"{out} has the finished run of this command: its result is shown again")
            if state.is_main_process:
                shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
            return Tuned(out, before)
        tuner = self._tuner(loaded, train, dev, schedule)
        state.wait_for_everyone()
        if state.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
            write_recipe(recipe, out)
        result = tuner.run(
            resume=before is not None, record=lambda done: write_recipe(recipe | {"result": asdict(done)}, out)
        )
        if state.is_main_process:
            write_card(out, self.checkpoint, schedule, "tune")
        return Tuned(out, recipe | {"result": asdict(result)})

    def _check(self) -> None:
        """Refuse wrong options before weights are loaded."""
        settings = self.settings
        if settings.self and (self.train or self.dev):
            raise UsageError(f"`{'train' if self.train else 'dev'}` and `self` exclude each other: give one of them")
        self._schedule([_SOME_POSITIONS])  # refuses what does not fit the model
        before = (self.recipe or {}).get("checkpoint") or {}
        fitted = self.fit is not None or self.checkpoint.fit is not None
        if before.get("fit") is not None and not fitted:
            raise UsageError(
                "the run of the recipe started from a fit, and there is none: give `schedule` with the file beside the "
                "fit"
            )
        if settings.self:
            self_template(settings)
        fresh = [name for name in _FRESH_LORA if getattr(settings, name) != getattr(TuneOptions, name)]
        if self.continues_adapter and fresh:
            raise UsageError(
                f"{self.checkpoint.name} is an adapter, which is tuned further: leave out `{fresh[0]}`, or add "
                "`merge`, which merges it and tunes a fresh one"
            )

    def _records(self) -> tuple[PromptTemplate, dict[str, Records], Json]:
        """The template, the records to learn from and those that select the best weights; nothing was generated."""
        template = make_template(self.settings, self.train)
        files = self._read(template, train=self.train, dev=self.dev)
        if self.dev is None:
            files["train"], files["dev"] = held_out(files["train"])
        return template, files, {}

    def _own_answers(self, prompts: PromptSource | None) -> tuple[PromptTemplate, dict[str, Records], Json]:
        """The template, the model's answers as records to learn from and to select by, and how they were generated."""
        from skipdecode.learning.trainer import process_state

        settings, out, state = self.settings, self.out, process_state()
        state.wait_for_everyone()
        with state.main_process_first():  # other processes use its result
            loaded = self.model or load(self.checkpoint)
            settings.curriculum(self._schedule([settings.self_tokens])[0])  # refused before texts are generated
            template, generated = own_answers(
                *(loaded, settings, settings, prompts, out),
                seed=settings.seed,
                held_out=settings.dev_records or 0,
                overwrite=self.overwrite,
            )
            return template, self._read(template, train=out / TRAIN_FILE, dev=out / DEV_FILE), {"self": generated}

    def _recipe(self, loaded: LoadedModel, entries: Json) -> Json:
        """The recipe of these entries, with the options and what they depend on."""
        under = self.checkpoint.folder if self.continues_adapter else loaded.checkpoint.own_folder
        options = asdict(self.settings) | {"model": self.checkpoint.name, "base": self.checkpoint.given_base}
        entries |= {"base": base_entry(loaded.model, under), "environment": environment()}
        recipe = make_recipe({"options": options, **entries})
        if dataset := dataset_id(self.train):
            recipe["datasets"] = [dataset]
        return recipe

    def _read(self, template: PromptTemplate, **sources: Source | None) -> dict[str, Records]:
        named = {name: source for name, source in sources.items() if source is not None}
        check_streams(str(source) for source in named.values() if isinstance(source, str | Path))
        limits, skip_bad = {"dev": self.settings.dev_records}, self.settings.skips_bad or self.settings.self
        return {n: read_file(source, template, skip_bad=skip_bad).spread(limits.get(n)) for n, source in named.items()}

    def _loaded(self) -> tuple[LoadedModel, Json]:
        """The model to train, whose adapter is merged unless it is tuned further, and the digest of what was loaded."""
        settings = self.settings
        # Trained weights are fp32; mixed precision is for the forward pass. The base of a LoRA keeps its type.
        in_hardware = torch.cuda.is_available() or multiplies_bf16("cpu")
        as_stored = in_hardware and not settings.full and settings.precision != "fp32"
        if self.model is None:
            loaded = load(self.checkpoint, dtype="auto" if as_stored else "float32")
        else:
            loaded = replace(self.model, model=copied(self.model.model, None if as_stored else torch.float32))
        fit, file = self.fit, self.checkpoint.fit
        if fit is None and self.model is not None and file is not None and file != self.model.checkpoint.fit:
            fit = file.file  # beside the schedule file
        if isinstance(fit, str | Path):
            fit = FitFile(Path(fit) / FIT_FILE if Path(fit).is_dir() else Path(fit)).load(loaded.model)
        if fit is not None:
            set_fit(loaded.model, fit)
        digest = checkpoint_digest(loaded)
        if digest["fit"] is not None:
            note(f"the fit is {'trained with the weights' if settings.train_fit else 'not trained'}")
        if not self.continues_adapter:
            return replace(loaded, model=merge_adapter(loaded.model)), digest
        rows, known = vocabulary_size(loaded.model), self.checkpoint.config.get_text_config(decoder=True).vocab_size
        if rows != known:
            raise UsageError(
                f"the adapter was made for {rows} tokens and its base has {known}: an adapter with embeddings cannot "
                "be tuned further; add `merge`, which merges it and tunes a fresh one"
            )
        return loaded, digest

    def _schedule(self, lengths: Sequence[int]) -> tuple[Schedule, str]:
        """The schedule and its origin; positions by default: the 95th percentile of `lengths`."""
        own, stored, requested = self.checkpoint.schedule, (self.recipe or {}).get("schedule"), self.requested
        origin = "because neither the call nor the checkpoint names one" if own is None else "the checkpoint's own"
        if stored is not None:
            own, origin = Schedule.from_dict(stored), "the recipe's"
        elif self.settings.self and (own is None or own.is_full):
            layers = self.checkpoint.num_layers
            even = Schedule.even(layers, round(layers / _OWN_SPEEDUP))
            own = replace(even, name="", family="unified", speedup=_OWN_SPEEDUP)
            origin = "evenly spaced layers, because no schedule was given"
        if isinstance(requested, Schedule):
            origin = "the given one"
        elif requested is not None and not str(requested).startswith(":"):
            if self.seq_len is not None and not is_speedup(str(requested)):
                raise UsageError(f"`seq_len` is for a nominal speed-up, not for {requested}: leave it out")
            own, origin = None, f"from {requested}"
        return self.checkpoint.parse(requested, self.seq_len or seq_len_of(lengths), own), origin

    def _tuner(self, loaded: LoadedModel, train: list[Example], dev: list[Example], schedule: Schedule) -> Tuner:
        from skipdecode.learning.trainer import Tuner

        checkpoint = self.checkpoint
        here = not self.continues_adapter and Path(checkpoint.name).expanduser().is_dir()
        base = str(loaded.checkpoint.own_folder.resolve()) if here else checkpoint.base
        if checkpoint.given_base is not None and Path(base).expanduser().is_dir():
            base = str(Path(base).expanduser().resolve())
        dtype = checkpoint.config.dtype if self.model is None else self.model.model.dtype
        return Tuner(
            *(loaded.model, loaded.tokenizer, train, dev, schedule, self.settings, self.out),
            base_name=base,
            dtype=dtype or loaded.model.dtype,
        )


def copied(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A copy of a loaded model, in `dtype` unless None; weights that an engine fused are separate tensors again."""
    copied = copy.deepcopy(model)
    copied = copied if dtype is None else copied.to(dtype)
    for weight in copied.parameters():
        if weight.untyped_storage().nbytes() != weight.nbytes:
            weight.data = weight.data.clone()
    return copied


def in_hardware_type(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or a copy in fp32 on a CPU that emulates the model's type, which takes several times as long."""
    device, dtype = model.device.type, model.dtype
    exact = dtype == torch.float32 or (dtype == torch.bfloat16 and multiplies_bf16(device))
    return model if exact or device != "cpu" else copied(model, torch.float32)


def _name_ends(loaded: LoadedModel, examples: Sequence[Example]) -> None:
    """Have the tuned model's generation config name the tokens that end the learned responses."""
    if new := name_ends(loaded.model, {example.response[-1] for example in examples}):
        words = ", ".join(map(repr, loaded.tokenizer.convert_ids_to_tokens(new)))  # type: ignore[union-attr]
        note(f"responses end with {words}, which the generation config did not name: the tuned model's names it")
