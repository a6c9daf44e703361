"""The settings of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from skipdecode.common.options import Options, option, setting
from skipdecode.evaluation.metrics import FIDELITY, METRICS, MetricOptions
from skipdecode.schedule import Schedule


def method_name(schedule: Schedule) -> str:
    """The name, in tables, of decoding under a schedule."""
    return "full" if schedule.is_full else schedule.name


@dataclass(frozen=True)
class EvaluationSettings(Options):
    """Settings of a run, documented by their help texts. Raises UsageError if a value is out of range."""

    batch_size: int = option("sequences decoded together, also at full depth", default=16, least=1)
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
    ways: str = setting(
        "full: full depth with drafts from the text and with W8A8 weights too; all: also all schedules with these",
        default="",
        choices=("", "full", "all"),
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(EvaluationSettings, MetricOptions):
    """Options of `skipdecode.evaluate`, documented by their help texts. Raises UsageError for a wrong value."""

    overwrite: bool = option("replace an existing run in --out", default=False)
    name: str | None = option("text before the schedule's name in tables, such as the checkpoint's name", default=None)
    metrics: tuple[str, ...] = option(
        f"{', '.join(METRICS)} (default: those of the task, without those whose model is neither cached nor can be "
        f"downloaded); with --compare also {', '.join(FIDELITY)}",
        default=(),
    )
    bad_records: str = option(
        "records that cannot be read or whose prompt is too long for the model: refuse the file, or skip the records "
        "and print their lines",
        default="refuse",
        choices=("refuse", "skip"),
    )
    limit: int | None = option(
        "use only the first N records; without references, the number of prompts (default: all records, 128 prompts)",
        default=None,
        least=1,
    )
    chat: bool = option("apply the model's chat template", default=False)
    temperature: float = option("without references: of the texts that are compared; 0 is greedy", default=0.7, least=0)
    top_p: float = option(
        "without references: sample from the most likely tokens with this total probability",
        default=0.95,
        above=0,
        most=1,
    )
