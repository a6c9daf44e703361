"""Text for every prompt, in batches, with fewer layers per token: prompts in, JSONL out.

Prompts are arguments, or lines of a text file, or rows of a JSONL file. Each output row has the id of its prompt (field
"id", else the line number), "text", "new_tokens" and "finish_reason" (eos, length or stop), in the order of the input.
A row that cannot be used is reported with its line and written as {"id", "line", "error"}; the exit code is then 1.

With --output FILE finished rows are kept in FILE.partial: after a kill or Ctrl-C the same command goes on where it
stopped.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.options import (
    EngineOptions,
    ModelOptions,
    ScheduleOptions,
    ThreadOptions,
    check_schedule_options,
    choose_schedule,
    with_breaks,
)
from skipdecode.common.options import option
from skipdecode.errors import DataError, UsageError

if TYPE_CHECKING:
    from skipdecode.cli.options import ScheduleChoice
    from skipdecode.data.output import RowWriter
    from skipdecode.data.report import BadRows
    from skipdecode.data.run import Job
    from skipdecode.data.source import PromptSource
    from skipdecode.data.summary import RunSummary
    from skipdecode.engine.backend import GenerationSettings
    from skipdecode.engine.engines import BackendSource
    from skipdecode.models.loading.hub import LoadedModel
    from skipdecode.schedule import Schedule

__all__ = ["Config", "run"]

_INTERRUPTED = 130
_COMPARED_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, ModelOptions, ThreadOptions, ScheduleOptions):
    """Options of `skipdecode generate`."""

    model: str = option("a local directory, a hub id, or smollm2-135m", positional=True)
    prompts: tuple[str, ...] = option("prompts, instead of --input", positional=True, default=())
    input: str | None = option(
        "file of prompts, - for standard input (which is also read if no prompt is given and it is no terminal)",
        default=None,
    )
    format: str = option(
        "of the input; auto: JSONL for .jsonl, .ndjson and .json, and for standard input that starts with {, else one "
        "prompt a line",
        default="auto",
        choices=("auto", "jsonl", "txt"),
    )
    field: str | None = option(
        "JSONL field that holds the prompt (default: the first of prompt, messages, text, input, question, mr)",
        default=None,
    )
    output: str = option("JSONL file, - for standard output", default="-")
    overwrite: bool = option("replace an output file that exists", default=False)
    restart: bool = option("drop what an interrupted run left in FILE.partial", default=False)
    on_error: str = option(
        "bad rows: skip them (and write the error in their place), or stop at the first",
        default="skip",
        choices=("skip", "stop"),
    )
    chat: bool = option("put prompts into the model's chat template; lists of messages always are", default=False)
    system: str | None = option("system message in front of every chat; implies --chat", default=None)
    include_prompt: bool = option("repeat the prompt in the output row", default=False)
    max_new_tokens: int = option("most new tokens a row", default=128)
    batch_size: int = option("rows decoded together", default=8, least=1)
    temperature: float = option("0 takes the likeliest token; above, tokens are sampled", default=0.0)
    top_k: int = option("sample from the k likeliest tokens only; 0 for all", default=0)
    top_p: float = option("sample from the likeliest tokens that together have this probability", default=1.0)
    seed: int = option("of sampling; a row's draws depend on this and its row number, not on its batch", default=0)
    stop: tuple[str, ...] = option(
        r"texts that end a row, cut off; \n and \t are understood", default=(), parse=with_breaks
    )
    compare: bool = option(
        f"also run full depth on up to about {_COMPARED_BATCHES} batches, alternating, and print both speeds",
        default=False,
    )
    summary: str | None = option("file for the run's figures as JSON", default=None)


def run(config: Config) -> int:
    """Generate; returns 0, 1 if rows were bad, or 130 if interrupted."""
    from skipdecode.data.output import check_output, open_writer
    from skipdecode.data.report import BadRows, note

    settings = _checked_settings(config)
    check_output(config.output, overwrite=config.overwrite)
    if config.summary is not None:
        check_output(config.summary, overwrite=True)
    source = _source(config)
    bad_rows = BadRows()
    rows = _survey(source, config, bad_rows)
    loaded, choice, backends = _load(config)
    fingerprint = _fingerprint(config, settings, source, choice.schedule) | {"engine": backends.engine}
    writer = open_writer(config.output, fingerprint, restart=config.restart)
    try:
        job = _job(config, settings, loaded, (backends, choice.schedule), rows - writer.rows_before)
        summary = _generate(source, config, job, writer, rows, bad_rows)
    except KeyboardInterrupt:
        note(f"interrupted: {writer.resume_hint}")
        return _INTERRUPTED
    finally:
        writer.close()
        source.close()
    _tell(config, summary, fingerprint)
    return 1 if summary.bad_rows else 0


# ---------------------------------------------------------------------- before the model


def _checked_settings(config: Config) -> GenerationSettings:
    from skipdecode.engine.backend import GenerationSettings

    check_schedule_options(config)
    if config.prompts and config.input is not None:
        raise UsageError("prompts were given both as arguments and with --input: give one of them")
    if not config.prompts and config.input is None and sys.stdin.isatty():
        raise UsageError("no prompts: give some as arguments, or --input FILE, or --input - for standard input")
    if config.prompts and config.field is not None:
        raise UsageError("--field belongs to JSONL input, not to prompts given as arguments")
    if config.input is not None and _same_file(config.input, config.output):
        raise UsageError(f"--input and --output are the same file, {config.output}: name another output")
    return GenerationSettings(config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed)


def _same_file(one: str, other: str) -> bool:
    return Path(one).exists() and Path(other).exists() and Path(one).samefile(other)


def _source(config: Config) -> PromptSource:
    from skipdecode.data.source import PromptSource

    if config.prompts:
        return PromptSource.of_prompts(config.prompts)
    return PromptSource.open(config.input or "-", None if config.format == "auto" else config.format)


def _survey(source: PromptSource, config: Config, bad_rows: BadRows) -> int:
    """Read the input once: report what is wrong with it, return the number of rows."""
    from skipdecode.data.records import survey
    from skipdecode.data.report import note

    found = survey(source, config.field, stop_on_error=config.on_error == "stop", report=bad_rows.add)
    if found.bad == found.rows:
        raise DataError(f"nothing to generate: no row of {source.name} can be used")
    if found.duplicate is not None:
        row_id, first, second = found.duplicate
        note(
            f"{found.duplicates} rows have the id of an earlier row, such as {row_id!r} on lines {first} and {second}; "
            "all are generated, in order"
        )
    return found.rows


def _load(config: Config) -> tuple[LoadedModel, ScheduleChoice, BackendSource]:
    from skipdecode.data.report import note, schedule_line
    from skipdecode.engine.engines import open_backends
    from skipdecode.models.loading.hub import load_model

    config.use_threads()
    loaded = load_model(config.model, dtype=config.dtype, device=config.device)
    choice = choose_schedule(config, loaded.num_layers, carried=loaded.schedule, default_seq_len=config.max_new_tokens)
    note(schedule_line(choice.schedule, choice.origin))
    return loaded, choice, open_backends(loaded.model, loaded.tokenizer, config.engine, note, config.weights)


def _fingerprint(
    config: Config, settings: GenerationSettings, source: PromptSource, schedule: Schedule
) -> dict[str, Any]:
    """All that the output rows depend on; not how they are batched, so that a run may go on with smaller batches."""
    return {
        "model": config.model,
        "dtype": config.dtype,
        **dataclasses.asdict(settings),
        "stop": list(config.stop),
        "chat": config.chat,
        "system": config.system,
        "include_prompt": config.include_prompt,
        "schedule": schedule.to_dict(),
        "input": source.fingerprint | {"format": source.format, "field": config.field},
    }


# ---------------------------------------------------------------------- the run


def _job(
    config: Config,
    settings: GenerationSettings,
    loaded: LoadedModel,
    runs: tuple[BackendSource, Schedule],
    rows: int,
) -> Job:
    from skipdecode.data.prompts import PromptEncoder, context_length
    from skipdecode.data.run import CompareWith, Job, RowMaker
    from skipdecode.data.stopping import StopStrings

    tokenizer = loaded.tokenizer
    backends, schedule = runs
    chat = config.chat or config.system is not None
    stop = StopStrings(tokenizer, config.stop) if config.stop else None
    compare = None
    if config.compare:
        every = max(1, rows // config.batch_size // _COMPARED_BATCHES)
        compare = CompareWith(backends.backend(None), every)
    return Job(
        PromptEncoder(tokenizer, context_length(loaded.model), chat=chat, system=config.system),
        backends.backend(schedule),
        settings,
        RowMaker(tokenizer, stop, include_prompt=config.include_prompt),
        config.batch_size,
        compare,
    )


def _generate(
    source: PromptSource, config: Config, job: Job, writer: RowWriter, rows: int, bad_rows: BadRows
) -> RunSummary:
    from skipdecode.data.records import read_records
    from skipdecode.data.report import note, progress_bar
    from skipdecode.data.run import generate_rows, refuse_bad_rows

    if config.on_error == "stop":
        refuse_bad_rows(read_records(source, config.field), job.encoder)
    if writer.rows_before:
        note(f"{writer.rows_before} of {rows} rows were finished by an earlier run; going on from there")
    with progress_bar(rows, writer.rows_before) as progress:
        records = read_records(source, config.field, is_done=writer.is_done)
        return generate_rows(records, job, writer, report=bad_rows.add_encoded, progress=progress)


def _tell(config: Config, summary: RunSummary, settings: dict[str, Any]) -> None:
    from skipdecode.common.environment import environment
    from skipdecode.common.files import write_whole
    from skipdecode.data.report import note, summary_lines

    for line in summary_lines(summary):
        note(line)
    if config.summary is not None:
        document = {"settings": settings, "summary": summary.to_dict(), "environment": environment()}
        write_whole(config.summary, json.dumps(document, indent=2) + "\n")
