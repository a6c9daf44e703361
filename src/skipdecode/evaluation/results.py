"""The settings of an evaluation, and a run as data.

A run is ``run.json`` (settings, scores, speed) and ``outputs.jsonl`` (one line per record). Tables and comparisons are
made from these two files alone. Until a run is saved, ``unfinished.sqlite`` keeps finished batches, so that a run that
was killed continues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skipdecode.common.bootstrap import Table
from skipdecode.common.files import RunDirectory, write_whole
from skipdecode.common.jsonl import Json, read_result
from skipdecode.common.options import OVERWRITE, Options, option, setting
from skipdecode.common.resume import ANEW, ResumeLog
from skipdecode.common.rows import read_rows
from skipdecode.data.examples import bad_records_option
from skipdecode.engine.requests import BATCH
from skipdecode.errors import DataError, OutputError
from skipdecode.evaluation.metrics import FIDELITY, METRICS, EncoderOptions
from skipdecode.generation.self_generated import LOG_FILE
from skipdecode.models.loading.identity import checkpoint_digest

if TYPE_CHECKING:
    from skipdecode.generation.llm import LLM

RUN_FILE = "run.json"
OUTPUTS_FILE = "outputs.jsonl"
_UNFINISHED = "unfinished.sqlite"
EVAL_DIRECTORY = RunDirectory(
    "run of skipdecode eval", {"run.json": "kind", "*/run.json": "kind", _UNFINISHED: "", LOG_FILE: ""}
)
_NEEDED = ("name", "config", "metrics", "outputs", "environment", "n", "kept", "free_running")


@dataclass(frozen=True)
class EvaluationSettings(Options):
    """Settings of a run, documented by their help texts. Raises UsageError if a value is out of range."""

    batch_size: int = option("sequences decoded together, also at full depth", default=BATCH, least=1)
    max_new_tokens: int | None = option(
        "most tokens of an output (default: the task's, or 256 without references)", default=None, least=1
    )
    full_depth: bool = option(
        "run, score and show full depth too, which retention, agreement and speed refer to", default=True
    )
    teacher_forced: bool = option(
        "also the loss on references, and top-1 agreement and KL on full depth's outputs; takes about as long as "
        "generating them",
        default=True,
    )
    resamples: int = option("draws of the bootstrap", default=1000, least=1)
    seed: int = option("of the bootstrap; decoding is greedy", default=0)
    speed_batches: int = setting("batches whose speed is measured", default=4, least=1)
    speed_rounds: int = setting("rounds in which it is measured", default=3, least=1)
    speed_tokens: int = setting("mean new tokens of a request; decoding of shorter texts counts as more", default=1)
    w8a8: bool = setting(
        "run, score and time full depth and the schedules with W8A8 weights too, where the fast engine has them here",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(EvaluationSettings, EncoderOptions):
    """Options of `skipdecode.evaluate`, documented by their help texts. Raises UsageError for a wrong value."""

    overwrite: bool = option(OVERWRITE, default=False)
    name: str | None = option("text before the schedule's name in tables, such as the checkpoint's name", default=None)
    metrics: tuple[str, ...] = option(
        f"{', '.join(METRICS)} (default: those of the task, without those whose model is neither cached nor can be "
        f"downloaded); with --compare also {', '.join(FIDELITY)}",
        default=(),
    )
    bad_records: str = bad_records_option("refuse")
    limit: int | None = option(
        "use only the first N records; without references, the number of prompts (default: all records, 128 prompts)",
        default=None,
        least=1,
    )
    spread: bool = setting("take the records of `limit` from all over the data", default=False)
    chat: bool = option("apply the model's chat template", default=False)
    temperature: float = option("without references: of the texts that are compared; 0 is greedy", default=0.7, least=0)
    top_p: float = option(
        "without references: sample from the most likely tokens with this total probability",
        default=0.95,
        above=0,
        most=1,
    )


@dataclass(frozen=True)
class Run:
    """A finished run, read back: its ``run.json`` and the document in it."""

    path: Path
    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Label in tables."""
        return str(self.data["name"])

    @property
    def full_depth(self) -> bool:
        """Whether every layer ran for every token."""
        return bool(self.data["config"].get("method", {}).get("name") == "full")

    @cached_property
    def outputs(self) -> list[Json]:
        """Rows of the outputs file, in the order of the data; raises DataError if it is missing or broken."""
        path = self.path.parent / str(self.data["outputs"])
        if not path.is_file():
            raise DataError(f"{self.path} names the outputs {path}, which cannot be read")
        rows = []
        for line, row in read_rows(path):
            if isinstance(row, DataError):
                raise DataError(f"{path} is broken: {row}; run the evaluation again", line)
            rows.append(row)
        if len(rows) != self.data["n"]:
            raise DataError(f"{path} has {len(rows)} of {self.data['n']} records: run the evaluation again")
        return rows

    def table(self, metric: str) -> Table:
        """Statistics of each record, shape (records, k)."""
        try:
            return np.asarray([row["statistics"][metric] for row in self.outputs], dtype=np.float64)
        except KeyError:
            raise DataError(f"{self.path} has no statistics of {metric}: run it again with metrics={metric}") from None


def load_run(path: str | Path) -> Run:
    """A run from its ``run.json``, or from the directory that holds it.

    Raises DataError: the file cannot be read, or is not such a document.
    """
    file = Path(path)
    file = file / RUN_FILE if file.is_dir() else file
    data = read_result(file, "evaluation")
    missing = [name for name in _NEEDED if name not in data]
    if missing:
        raise DataError(f"{file} is not a run of `skipdecode eval`: it lacks {missing[0]!r}")
    return Run(file, data)


def check_free(directory: Path, *, overwrite: bool) -> None:
    """Raise OutputError, before any heavy work, if the directory holds a finished run."""
    if (directory / RUN_FILE).exists() and not overwrite:
        raise OutputError(f"{directory} holds a run already: give `overwrite` to replace it, or another directory")


def save_run(directory: Path, data: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]]) -> Run:
    """Write the outputs, then the document, each in one step, so that a run that exists is complete."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in outputs)
    write_whole(directory / OUTPUTS_FILE, lines)
    write_whole(directory / RUN_FILE, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return Run(directory / RUN_FILE, data)


def is_unfinished(directory: Path) -> bool:
    """Whether the directory holds an unfinished run."""
    return (directory / _UNFINISHED).exists()


@contextmanager
def unfinished_log(
    directory: Path, about: Mapping[str, Any], runs: Iterable[Path], *, overwrite: bool
) -> Iterator[ResumeLog]:
    """The log of a run until it is saved in the directories `runs`, at the end of the context.

    `about` is JSON-ready and has everything that the outputs depend on. With `overwrite`, the log of another run is
    replaced; else it is refused with an OutputError, and so are finished runs, unless this run continues.
    """
    # Digests of each part, because the whole is as long as the prompts.
    parts = {
        name: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for name, part in about.items()
    }
    log = ResumeLog(directory / _UNFINISHED, parts, what="finished batches", remedy=ANEW, restart=overwrite)
    with closing(log):
        for run in runs:
            # A run that continues wrote the results that are there, or may replace them.
            check_free(run, overwrite=overwrite or log.count > 0)
        yield log
        log.remove()


def model_about(llm: LLM, name: str | None) -> Json:
    """What a result says of a loaded model; `name` is its name in tables."""
    loaded, fast = llm.loaded, llm.backend.fast
    return {
        "name": name,
        "model": loaded.checkpoint.name,
        "quantization": (fast and fast.quantization) or "none",
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "checkpoint": checkpoint_digest(loaded),
    }
