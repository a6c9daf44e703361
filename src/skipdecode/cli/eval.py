"""Measure quality, fidelity and speed of schedules; compare runs.

  skipdecode eval MODEL --task e2e --data test.jsonl --schedule 2x --out runs/2x
  skipdecode eval MODEL --task e2e --data test.jsonl --schedule 2x 3x:p15 mine.json --out runs
  skipdecode eval MODEL --out runs
  skipdecode eval --compare runs/full runs/2x

The first form generates an output for each record with the schedule and at full depth, scores both, and shows first the
share of full depth's scores that the schedule keeps. Speed is measured on a few batches, with the same output lengths
for both. It writes OUT/run.json and OUT/outputs.jsonl, and the same files for full depth in OUT/full.
After an interruption, the same command continues.
The second form evaluates several schedules, which share full depth; each has its own directory in OUT. All run on
the fast engine if it supports the model, else through transformers (--engine).
The third form, without --task and --data, needs no records: it measures the KL divergence from the base model, the base
model's perplexity on the texts of each schedule.
The fourth form compares finished runs with the first of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from skipdecode.cli.options import BASE, MODEL, READS_SCHEDULE, CheckpointRules, EngineOptions, choose_schedule
from skipdecode.common.options import Reads, option
from skipdecode.common.progress import note
from skipdecode.data.prompts import prompt_room
from skipdecode.data.tasks import task_file
from skipdecode.evaluation.metrics import EncoderOptions, check_metrics
from skipdecode.evaluation.results import EVAL_DIRECTORY, EvaluationOptions, load_run
from skipdecode.models.checkpoint_schedule import schedule_file
from skipdecode.models.loading.checkpoint import Checkpoint, model_files
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.evaluation.evaluate import Scores
    from skipdecode.generation.llm import LLM


def _files_of_run(run: str) -> list[Path]:
    path = Path(run)
    folder = path if path.is_dir() else path.parent
    return [path, folder / "run.json", folder / "outputs.jsonl"]


@dataclass(frozen=True, kw_only=True)
class Config(EvaluationOptions, EngineOptions, CheckpointRules):
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
        "schedules, which share full depth (see below; default: the checkpoint's own)",
        default=(),
        alias="methods",
        parse=schedule_file,
        path=READS_SCHEDULE,
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

    ONE_OF: ClassVar = (("model", "compare"), ("out", "compare"))
    NEEDS: ClassVar = {"seq_len": ("schedule",)}
    EXCLUDES: ClassVar = {"compare": ("model", "task", "out", "schedule"), "prompts": ("task", "data", "compare")}

    @property
    def without_references(self) -> bool:
        """Whether schedules are compared on texts of the model."""
        return not self.task and self.data is None

    @property
    def adapter_base(self) -> str | None:
        """The base model of --base; without references it is the model to compare with."""
        return None if self.without_references else self.base


def run(config: Config) -> int:
    check_metrics(config.metrics, config.part(EncoderOptions))
    scores = _compared(config) if config.compare else _evaluated(config)
    if config.json:
        print(json.dumps(scores.document, indent=1))
        return 0
    print(scores)
    if not config.compare:
        print()
        for run in scores.runs:
            print(f"{run.data.get('name', 'all schedules')}: {run.path}, {run.data['outputs']} beside it")
    return 0


def _compared(config: Config) -> Scores:
    runs = [load_run(path) for path in config.compare]  # before torch is imported
    from skipdecode.evaluation.compare import compare_runs
    from skipdecode.evaluation.evaluate import Scores

    return Scores(runs, compare_runs(runs, config.metrics, resamples=config.resamples, seed=config.seed))


def _evaluated(config: Config) -> Scores:
    context = config.checkpoint.entries.get("max_position_embeddings")
    if config.max_new_tokens and isinstance(context, int):
        prompt_room(context, config.max_new_tokens)
    from skipdecode.engine.opening import load
    from skipdecode.evaluation.evaluate import evaluate

    def opened(checkpoint: Checkpoint) -> LLM:
        is_own = checkpoint is config.checkpoint
        loaded = config.load() if is_own else load(checkpoint, dtype=config.dtype, device=config.device)
        return config.llm(loaded, generation_config=config.generation_config)

    return evaluate(
        config.checkpoint,
        config.data,
        _schedules(config),
        task=config.task or None,
        prompts=config.prompts,
        base=config.base if config.without_references else None,
        out=config.out,
        loader=opened,
        **asdict(config.part(EvaluationOptions)),
    )


def _schedules(config: Config) -> Schedule | list[Schedule]:
    """The schedules that the options name: a single one, or a list; their origins are printed. Needs no weights."""
    from skipdecode.generation.speed import method_name

    default_seq_len = _default_seq_len(config) if config.schedule else 1
    chosen = [choose_schedule(config, text, default_seq_len) for text in config.schedule]
    for schedule, origin in chosen:
        note(f"{method_name(schedule)}: {origin}")
    schedules = [schedule for schedule, _ in chosen]
    return schedules[0] if len(schedules) == 1 else schedules


def _default_seq_len(config: Config) -> int:
    from skipdecode.evaluation.evaluate import task_of
    from skipdecode.evaluation.reference_free import ReferenceFreeEvaluation

    if config.without_references:
        return config.max_new_tokens or ReferenceFreeEvaluation.TOKENS
    task = task_of(config.checkpoint, config.task or None)
    return task.response_tokens.get("p95", config.max_new_tokens or task.max_new_tokens)
