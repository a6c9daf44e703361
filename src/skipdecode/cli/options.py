"""Options of several verbs: each group is a dataclass, and the config of a verb inherits from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.common.environment import limit_threads
from skipdecode.common.jsonl import Fields, Json, object_of
from skipdecode.common.options import Options, Reads, kinds, option
from skipdecode.common.progress import detail, note
from skipdecode.common.rows import check_source
from skipdecode.data.examples import with_breaks
from skipdecode.data.tasks import load_task
from skipdecode.engine.base import ENGINES, QUANTIZATIONS
from skipdecode.engine.requests import SamplingOptions
from skipdecode.errors import DataError, UsageError
from skipdecode.models.checkpoint_schedule import schedule_file
from skipdecode.models.loading.checkpoint import Checkpoint, LoadedModel, model_files, open_checkpoint
from skipdecode.models.loading.hub import DTYPES
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of, is_speedup
from skipdecode.schedule.order import prompt_set

if TYPE_CHECKING:
    from skipdecode.generation.llm import LLM

SOME_POSITIONS = 64
"""Positions of a speed-up where their number does not matter: for a check, or the same layers at all positions."""


def json_object(text: str) -> Json:
    """The object of a JSON text; raises ValueError."""
    value = object_of(text.encode())
    if isinstance(value, DataError):
        raise ValueError(f"a JSON object ({value})")
    return value


def device_name(text: str) -> str:
    """The name of a device that can hold weights; raises ValueError. Whether it is there, torch says."""
    if re.fullmatch(r"cpu|mps|(cuda|xpu)(:\d+)?", text) is None:
        raise ValueError("cpu, cuda or cuda:1, mps, or xpu")
    return text


READS_SCHEDULE = Reads(lambda text: (Path(base_of(text)),))
BASE = "for an adapter: its base model, a directory or a name (default: the one that the adapter names)"
MODEL = (
    "directory of a model or an adapter, hub id (owner/name, owner/name@REVISION), smollm2-135m, or its adapters "
    "e2e-smollm2-135m, chat-smollm2-135m"
)


@dataclass(frozen=True, kw_only=True)
class NamedModel(Options):
    """A model by name; `follows_prepared`: a directory of `prepare` stands for the model that it recommends."""

    follows_prepared: ClassVar[bool] = True

    model: str = option(MODEL, positional=True, path=Reads(model_files))
    base: str | None = option(BASE, default=None, path=Reads(model_files))
    revision: str | None = option("branch, tag or commit of MODEL on its hub: owner/name@REVISION", default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.revision and self.model:  # once: parts of options are made of options
            object.__setattr__(self, "model", f"{self.model.removesuffix(f'@{self.revision}')}@{self.revision}")

    @property
    def adapter_base(self) -> str | None:
        """The base model of --base, for the adapter."""
        return self.base

    @property
    def words(self) -> list[str]:
        """The words that name the model on another command line."""
        return [self.model, *(() if self.base is None else ("--base", self.base))]

    @property
    def schedule_texts(self) -> tuple[str, ...]:
        """The schedules that the options name."""
        named: str | tuple[str, ...] = getattr(self, "schedule", None) or ()
        return (named,) if isinstance(named, str) else named

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The model of the name, with the schedule files among the options."""
        return open_checkpoint(self.model, self.adapter_base, self.schedule_texts, getattr(self, "dtype", "auto"))


@dataclass(frozen=True, kw_only=True)
class EngineOptions(NamedModel):
    threads: int | None = option(
        "CPU threads (default: chosen by torch, at most the processors that affinity and CPU quota allow)",
        default=None,
        least=1,
    )

    dtype: str = option(
        "type of the weights; auto: the type in the checkpoint, but for smollm2-135m, for models that tune trained in "
        "bf16 and, on CPUs, for bf16 checkpoints: bfloat16, or float32 for the transformers engine on CPUs without "
        "bf16 instructions",
        default="auto",
        choices=DTYPES,
    )
    device: str | None = option(
        "torch device (default: the first GPU if there is one, else cpu)", default=None, parse=device_name
    )

    engine: str = option(
        "fast: this package's engine (CPUs; `skipdecode info` lists the model types); auto: fast if it supports the "
        "model, else transformers",
        default="auto",
        choices=ENGINES,
    )
    quantization: str = option(
        "quantize the weights after loading (fast engine, CPUs): int8 is faster and less exact; w8a8 also has "
        "8-bit activations, for batches and long prompts (CPUs with AVX512_VNNI, with AVX2 and no AVX-512, or ARM with "
        "dotprod)",
        default="none",
        alias="weights",
        choices=QUANTIZATIONS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization != "none" and self.engine == "transformers":
            raise UsageError(
                f"--quantization {self.quantization} needs the fast engine: leave out --engine transformers"
            )

    def use_threads(self) -> None:
        limit_threads()
        if self.threads is not None:
            import torch

            torch.set_num_threads(self.threads)

    def load(self) -> LoadedModel:
        """The model with its weights and its fit."""
        from skipdecode.engine.opening import load  # imports torch
        from skipdecode.models.fit import fit_of

        self.use_threads()
        loaded = load(self.checkpoint, dtype=self.dtype, device=self.device, engine=self.engine)
        file, fit = self.checkpoint.fit, fit_of(loaded.model)
        if file is not None and fit is not None:
            detail(f"fit {file.file}: {fit.describe()}")
            if file.unused is not None:
                note(f"the checkpoint's own fit, {file.unused}, is not used: copy the schedule beside it to use it")
        return loaded

    def llm(self, loaded: LoadedModel, schedule: Schedule | None = None, **options: Any) -> LLM:
        """The loaded model on the engine of the options; `options` are further ones of `LLM`."""
        from skipdecode.generation.llm import LLM  # imports torch

        return LLM(loaded, schedule, engine=self.engine, quantization=self.quantization, **options)


@dataclass(frozen=True, kw_only=True)
class TrainingFiles(Options):
    train: str = option(
        "file of training records (JSONL, JSON, Parquet, CSV), or owner/name:split", default="", path=Reads()
    )
    dev: str = option(
        "file of records that select the best weights (default: a tenth of --train)", default="", path=Reads()
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointRules(Options):
    """Whether the checkpoint says how tokens are chosen."""

    generation_config: bool = option(
        "follow the rules (repetition_penalty, …) and stop strings of the checkpoint's generation_config.json where no "
        "option gives others",
        default=True,
    )


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(CheckpointRules, SamplingOptions):
    seed: int = option(
        "seed of sampling; the random numbers of a record depend on the seed and the number of the record, not on its "
        "batch",
        default=0,
    )
    exact: bool = option(
        "draft tokens from the text and from earlier answers where that is faster (fast engine): drafts are checked, "
        "so the tokens are the same",
        default=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_effect()

    def sampling_fields(self) -> Json:
        """The fields of `skipdecode.engine.Sampling` that are given, and the seed."""
        return {name: getattr(self, name) for name in kinds(SamplingOptions) if name in {"seed", *self.given}}


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(Options):
    """The schedule: a text of `skipdecode.schedule.grammar`, or that of the checkpoint."""

    NEEDS: ClassVar = {"seq_len": ("schedule",)}

    schedule: str | None = option(
        "layers of prompts and new tokens: 2x, 2x:p15, a file, … (see below; default: the checkpoint's schedule, else "
        "full depth)",
        default=None,
        parse=schedule_file,
        path=READS_SCHEDULE,
    )
    seq_len: int | None = option(
        "positions over which a speed-up such as 2x decreases the depth; best near the real output length (default: "
        "the 95th percentile of the response lengths for tune and eval, else --max-new-tokens)",
        default=None,
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Options):
    chat_template_kwargs: Fields | None = option(
        "variables of the chat template, as JSON, such as '{\"enable_thinking\": false}'",
        default=None,
        parse=json_object,
    )


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    push_to_hub: str | None = option(
        "upload the result with its schedule, fit and model card to this repository of a hub (owner/name), which is "
        "made private if it is new",
        default=None,
    )

    def push(self, folder: Path | None = None) -> None:
        """Upload a directory; without one, refuse a repository that cannot be written, before long work."""
        from skipdecode.models.loading.card import make_repo, push_to_hub

        if self.push_to_hub is not None and folder is None:
            make_repo(self.push_to_hub)
        elif self.push_to_hub is not None and folder is not None:
            note(f"pushed to {push_to_hub(folder, self.push_to_hub)}")


def check_inputs(config: Options) -> None:
    """Refuse files, tasks, models and schedules that are not there, before torch and transformers are imported.

    Raises DataError, UsageError, ModelLoadError, ScheduleError, MissingExtraError.
    """
    for name, kind in kinds(type(config)).items():
        value, path = getattr(config, name), kind.metadata["path"]
        if value and isinstance(path, Reads) and path == Reads():
            check_source(value)
    if task := getattr(config, "task", None):
        load_task(task)
    if isinstance(config, NamedModel) and config.model:
        _check_model(config)


def _check_model(config: NamedModel) -> None:
    """Refuse a model that is not there, and schedules that are not for it."""
    checkpoint = config.checkpoint
    for text in filter(None, (getattr(config, "prompt_layers", None), *getattr(config, "sampled_prompts", ()))):
        prompt_set(text, checkpoint.num_layers)
    for text in config.schedule_texts:
        checkpoint.read_schedule(text, getattr(config, "seq_len", None) or SOME_POSITIONS)


def choose_schedule(config: Any, text: str | None, default_seq_len: int) -> tuple[Schedule, str]:
    """The schedule of a text for the model of a command, else that of the checkpoint, else full depth; and its origin.

    `config`: the options of the command. `default_seq_len`: positions for a speed-up without --seq-len.

    Raises ScheduleError: the schedule does not fit the model, or the text has no form of `skipdecode.schedule.grammar`.
    """
    checkpoint = config.checkpoint
    if text is None:
        has_schedule = checkpoint.schedule is not None
        origin = "the checkpoint's own" if has_schedule else "the checkpoint has no schedule; --schedule selects one"
        return checkpoint.parse(None, default_seq_len), origin
    if config.seq_len is not None and text == config.schedule and not is_speedup(text):
        raise UsageError(f"--seq-len is for a speed-up, not for {text}: leave it out")
    origin = "of the checkpoint" if text in checkpoint.schedules else f"from {text}"
    return checkpoint.parse(text, config.seq_len or default_seq_len), origin


def stop_text(text: str) -> str:
    """A stop string, as `with_breaks` reads it; raises ValueError if it is empty."""
    if not text:
        raise ValueError("a text that is not empty")
    return with_breaks(text)
