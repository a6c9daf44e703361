"""Options of `skipdecode eval`, and the schedules that they select."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from skipdecode.cli.options import (
    BASE,
    MODEL,
    EngineOptions,
    ScheduleOptions,
    choose_schedule,
)
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.data.tasks import task_file
from skipdecode.evaluation.results import EVAL_DIRECTORY
from skipdecode.evaluation.settings import EvaluationOptions, method_name
from skipdecode.models.loading.ref import model_files
from skipdecode.schedule import Schedule
from skipdecode.schedule.grammar import base_of, is_speedup


def _files_of_run(place: str) -> list[Path]:
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    return [path, folder / "run.json", folder / "outputs.jsonl"]


def _schedule_file(method: str) -> list[Path]:
    base = base_of(method)
    return [Path(base)] if base.endswith(".json") else []


@dataclass(frozen=True, kw_only=True)
class Config(EvaluationOptions, ScheduleOptions, EngineOptions):
    """Options of `skipdecode eval`."""

    model: str = option(MODEL, default="", positional=True, path=Reads(model_files))
    task: str = option(
        "e2e, cnn_dm, tldr, jsonl (your own records), or a task file (*.yaml) (default with --data: the template that "
        "the checkpoint was tuned on, else jsonl)",
        default="",
        path=Reads(task_file),
    )
    data: str | None = option(
        "JSONL or CSV file of records with references (default with --task: the dataset of the task, from the hub)",
        default=None,
        path=Reads(),
    )
    prompts: str | None = option(
        "without references: file of prompts, read as generate reads its input (default: the base model draws them, by "
        "its chat template)",
        default=None,
        path=Reads(),
    )
    methods: tuple[str, ...] = option(
        "several schedules in one run, as --schedule names them: full, 2x, 2x:p15, files (*.json), names of the "
        "checkpoint's schedules",
        default=(),
        path=Reads(_schedule_file),
    )
    out: str | None = option("directory for run.json and outputs.jsonl", default=None, path=EVAL_DIRECTORY)
    compare: tuple[str, ...] = option(
        "runs (run.json or its directory), which are compared with the first of them",
        default=(),
        path=Reads(_files_of_run),
    )
    json: bool = option("print one JSON document", default=False)
    base: str | None = option(
        f"{BASE}; without references: the base model to compare with (default: the model that MODEL was tuned from)",
        default=None,
        path=Reads(model_files),
    )

    NEEDS: ClassVar = {"seq_len": ("nominal_speedup", "schedule", "methods")}
    EXCLUDES: ClassVar = ScheduleOptions.EXCLUDES | {
        "compare": ("model", "task", "out", "methods"),
        "methods": ("schedule", "nominal_speedup"),
        "prompts": ("task", "data", "compare"),
    }

    @property
    def without_references(self) -> bool:
        """Whether schedules are compared on texts of the model."""
        return not self.task and self.data is None

    @property
    def adapter_base(self) -> str | None:
        """The base model of --base; without references it is the model to compare with."""
        return None if self.without_references else self.base


def asked_schedules(config: Config) -> Schedule | list[Schedule] | tuple[()]:
    """The schedules that the options name, a single one unless they come from --methods; their origins are printed.

    Nothing if no option names one. Needs no weights.
    """
    if not any((config.methods, config.schedule, config.nominal_speedup, config.prompt_layers, config.flat)):
        return ()
    ref, default_seq_len = config.ref, _default_seq_len(config)
    one_by_one = [
        replace(config, methods=(), schedule=word, seq_len=config.seq_len if is_speedup(word) else None)
        for word in config.methods
    ]
    chosen = [
        choose_schedule(one, ref.num_layers, carried=ref.schedule, default_seq_len=default_seq_len, named=ref.schedules)
        for one in one_by_one or [config]
    ]
    for schedule, origin in chosen:
        note(f"{method_name(schedule, config.exact)}: {origin}")
    return [schedule for schedule, _ in chosen] if config.methods else chosen[0].schedule


def _default_seq_len(config: Config) -> int:
    from skipdecode.evaluation.evaluate import task_of
    from skipdecode.evaluation.self_generated import OwnTexts

    if config.without_references:
        return config.max_new_tokens or OwnTexts.TOKENS
    task = task_of(config.ref, config.task or None)
    return task.response_tokens.get("p95", config.max_new_tokens or task.max_new_tokens)
