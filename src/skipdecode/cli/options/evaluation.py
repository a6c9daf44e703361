"""Options of `skipdecode eval`, and the schedules that they select."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from skipdecode.cli.options import (
    BASE,
    MODEL,
    SCHEDULE_FILE,
    EngineOptions,
    choose_schedule,
)
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.data.tasks import task_file
from skipdecode.evaluation.results import EVAL_DIRECTORY
from skipdecode.evaluation.settings import EvaluationOptions, method_name
from skipdecode.models.carried import schedule_file
from skipdecode.models.loading.ref import model_files
from skipdecode.schedule import Schedule


def _files_of_run(place: str) -> list[Path]:
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    return [path, folder / "run.json", folder / "outputs.jsonl"]


@dataclass(frozen=True, kw_only=True)
class Config(EvaluationOptions, EngineOptions):
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
    schedule: tuple[str, ...] = option(
        "schedules, which share full depth: full, 2x, 1.5x-wall, 2x:p15, 2x:flat, files (JSON), names of the "
        "checkpoint's schedules (default: the checkpoint's own)",
        default=(),
        alias="methods",
        parse=schedule_file,
        path=SCHEDULE_FILE,
    )
    seq_len: int | None = option(
        "positions over which a speed-up decreases the depth (default: the 95th percentile of the response lengths)",
        default=None,
        least=1,
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

    NEEDS: ClassVar = {"seq_len": ("schedule",)}
    EXCLUDES: ClassVar = {
        "compare": ("model", "task", "out", "schedule"),
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


def asked_schedules(config: Config) -> Schedule | list[Schedule]:
    """The schedules that the options name: a single one, or a list; their origins are printed. Needs no weights."""
    default_seq_len = _default_seq_len(config) if config.schedule else 1
    chosen = [choose_schedule(config, default_seq_len, text) for text in config.schedule]
    for schedule, origin in chosen:
        note(f"{method_name(schedule)}: {origin}")
    found = [schedule for schedule, _ in chosen]
    return found[0] if len(found) == 1 else found


def _default_seq_len(config: Config) -> int:
    from skipdecode.evaluation.evaluate import task_of
    from skipdecode.evaluation.self_generated import OwnTexts

    if config.without_references:
        return config.max_new_tokens or OwnTexts.TOKENS
    task = task_of(config.ref, config.task or None)
    return task.response_tokens.get("p95", config.max_new_tokens or task.max_new_tokens)
