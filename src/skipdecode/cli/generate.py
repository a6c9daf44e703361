"""Generate text for prompts, in batches, with fewer layers per token: text on a terminal, else JSONL.

Prompts are arguments, lines of a text file, or records of a JSONL or CSV file. A tuned checkpoint has the prompt
template that it was tuned on. The template is used for records that have its fields, and for plain texts if it has one
field; --prompt-template, --task and --no-template change this. Without a template, --field selects the prompt (default:
prompt, messages, text, instruction with input, input, question or mr). The chat template gets all fields of messages,
and the record's system and tools; an answer at the end of messages is left out. A note names, once, fields of records
that are not in the prompts.

An output record has the id of its prompt (field "id", else the line number), "text", "new_tokens" and "finish_reason"
(eos, length or stop); the order is that of the input. For an input record that cannot be used, a message names the
line, the output has {"id", "line", "error"} (id is null if the record has none), and the exit code is 1.

With --output FILE, finished records are kept in FILE.partial: after a kill or Ctrl-C, the same command continues.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.cli.options import (
    DecodingOptions,
    EngineOptions,
    ScheduleChoice,
    ScheduleOptions,
    choose_schedule,
    stop_text,
    with_breaks,
)
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.columns import speedups
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import json_line
from skipdecode.common.options import Reads, Writes, option
from skipdecode.common.progress import detail, note, progress_bar
from skipdecode.common.rows import FORMATS
from skipdecode.data.forms import PromptForm, choose_form
from skipdecode.data.prompts import PromptEncoder, asked, context_length
from skipdecode.data.records import SeenIds
from skipdecode.data.source import PromptSource
from skipdecode.data.stopping import StopStrings
from skipdecode.data.tasks import task_file
from skipdecode.engine.requests import Sampling
from skipdecode.errors import UsageError
from skipdecode.generation.output import RowWriter, named_text, open_writer, partial_path, plain_text
from skipdecode.models.families import vocabulary_size
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.models.loading.hub import LoadedModel
from skipdecode.schedule import Schedule

if TYPE_CHECKING:
    from skipdecode.engine.opening import Backend
    from skipdecode.generation.run import Job
    from skipdecode.generation.stats import RunStats


def _output_files(output: str) -> list[Path]:
    return [Path(output), partial_path(output)]


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, DecodingOptions, ScheduleOptions):
    """Options of `skipdecode generate`."""

    EXCLUDES: ClassVar = ScheduleOptions.EXCLUDES | {"prompts": ("input", "field")}

    prompts: tuple[str, ...] = option("prompts, instead of --input", positional=True, default=())
    input: str | None = option(
        "file of prompts, - for standard input (also read if no prompt is given and standard input is no terminal)",
        default=None,
        path=Reads(),
    )
    format: str = option(
        "format of the input; auto: CSV with a header for .csv and .tsv; JSONL for .jsonl, .ndjson, .json, and for "
        "what starts with { and is not named .txt; else one prompt per line",
        default="auto",
        choices=("auto", *FORMATS, "txt"),
    )
    field: str | None = option(
        "field with the prompt (default: that of the template, else prompt, messages, text, instruction with input, "
        "input, question or mr)",
        default=None,
    )
    prompt_template: str | None = option(
        "prompt text with fields of the record in braces, such as '{mr}\\n'; \\n is a line break (default: the "
        "template that the checkpoint was tuned on)",
        default=None,
        parse=with_breaks,
    )
    task: str | None = option(
        "use the prompt template of a task: its name or its YAML file", default=None, path=Reads(task_file)
    )
    template: bool = option(
        "use the template that the checkpoint was tuned on; --no-template: use prompts unchanged",
        default=True,
    )
    output: str = option("output file (JSONL), - for standard output", default="-", path=Writes(_output_files))
    output_format: str = option(
        "format of standard output; auto: text on a terminal (after its prompt if there are several), else JSONL",
        default="auto",
        choices=("auto", "jsonl", "text"),
    )
    overwrite: bool = option(OVERWRITE, default=False)
    restart: bool = option("ignore and replace FILE.partial of an interrupted run", default=False)
    on_error: str = option(
        "records that cannot be used: skip them and write the error in their place, or stop before any work",
        default="skip",
        choices=("skip", "stop"),
    )
    chat: bool = option("apply the model's chat template; lists of messages always get it", default=False)
    system: str | None = option("system message of every chat; implies --chat", default=None)
    include_prompt: bool = option("add the prompt to each output record", default=False)
    max_new_tokens: int = option("most new tokens of a record", default=128, least=1)
    batch_size: int = option("sequences decoded together", default=8, least=1)
    stop: tuple[str, ...] = option(
        r"stop string: ends the output and is cut off; \n and \t are accepted; repeat the flag for several",
        default=(),
        parse=stop_text,
    )
    compare: bool = option(
        "afterwards run up to 8 batches again, in turn with full depth, and print both speeds",
        default=False,
    )
    summary: str | None = option("file for the statistics of the run (JSON)", default=None, path=Writes())


def run(config: Config) -> int:
    """Generate; returns 0, 1 if records could not be used, or 130 if interrupted."""
    _check(config)
    source, form = _source(config), _form(config)
    ref, rows = config.ref, source.count(form, all_usable=config.on_error == "stop")
    chosen = choose_schedule(
        config, ref.num_layers, carried=ref.schedule, default_seq_len=config.max_new_tokens, named=ref.schedules
    )
    loaded = config.load()
    _tell_schedule(config, chosen, loaded)
    engines = config.engines(loaded)
    if form.remark is not None:
        note(form.remark)
    fingerprint = _fingerprint(config, source, form, chosen.schedule, loaded, engines)
    shown = json_line if not _prints_text(config) else named_text if rows > 1 else plain_text
    writer = open_writer(config.output, fingerprint, restart=config.restart, form=shown)
    try:
        summary = _generate(source, form, config, _job(config, loaded, form, engines, chosen.schedule), writer, rows)
    except KeyboardInterrupt:
        note(f"interrupted: {writer.resume_hint}")
        return 130
    finally:
        writer.close()
        source.close()
    _tell(config, summary, fingerprint)
    return 1 if summary.bad_rows else 0


# ---------------------------------------------------------------------- before the model


def _check(config: Config) -> None:
    if not config.prompts and config.input is None and sys.stdin.isatty():
        raise UsageError("no prompts: give them as arguments, with --input FILE, or on standard input with --input -")
    if config.output_format == "text" and config.output != "-":
        raise UsageError("--output-format text is for standard output: leave out --output, or redirect with > FILE")


def _prints_text(config: Config) -> bool:
    automatic = config.output_format == "auto" and sys.stdout.isatty()
    return config.output == "-" and (automatic or config.output_format == "text")


def _source(config: Config) -> PromptSource:
    if config.prompts:
        return PromptSource.of_prompts(config.prompts)
    return PromptSource.open(config.input or "-", None if config.format == "auto" else config.format)


def _form(config: Config) -> PromptForm:
    return choose_form(
        config.ref.recipe,
        prompt_template=config.prompt_template,
        task=config.task,
        no_template=not config.template,
        chat=config.chat or config.system is not None,
        field=config.field,
    )


def _tell_schedule(config: Config, chosen: ScheduleChoice, loaded: LoadedModel) -> None:
    from skipdecode.generation.stats import schedule_line

    note(schedule_line(*chosen))
    if not config.exact and (line := loaded.untuned_line([chosen.schedule])):
        note(line)


def _fingerprint(
    config: Config,
    source: PromptSource,
    form: PromptForm,
    schedule: Schedule,
    loaded: LoadedModel,
    engines: Backend,
) -> dict[str, Any]:
    """All that the output records depend on; without the batch size, so that a run may continue with another."""
    return {
        "model": config.model,
        "max_new_tokens": config.max_new_tokens,
        **config.sampling_fields(),
        **({"exact": True} if config.exact else {}),
        "stop": list(config.stop),
        "template": None if form.template is None else form.template.to_dict(),
        "chat": config.chat,
        "system": config.system,
        "include_prompt": config.include_prompt,
        "schedule": schedule.to_dict(),
        "input": source.fingerprint | {"field": config.field},
        "dtype": str(loaded.model.dtype).removeprefix("torch."),  # "auto" depends on the machine, as does the engine
        "engine": engines.name,
        "checkpoint": checkpoint_digest(loaded),
    }


# ---------------------------------------------------------------------- the run


def _job(config: Config, loaded: LoadedModel, form: PromptForm, engines: Backend, schedule: Schedule) -> Job:
    from skipdecode.engine.opening import end_tokens
    from skipdecode.generation.detokenizer import TokenTexts
    from skipdecode.generation.run import Job

    tokenizer, context = loaded.tokenizer, context_length(loaded.model.config)
    chat = config.chat or config.system is not None
    return Job(
        texts=TokenTexts(tokenizer),
        sampling=Sampling(**config.sampling_fields()),
        max_new_tokens=config.max_new_tokens,
        ends=end_tokens(loaded.model, tokenizer),
        stop=StopStrings(config.stop),
        exact=config.exact,
        encoder=PromptEncoder(
            tokenizer,
            context,
            chat=chat,
            system=config.system,
            template=form.template,
            vocabulary=vocabulary_size(loaded.model),
        ),
        make_engine=lambda rows: engines.engine(schedule, max_rows=rows),
        batch_size=config.batch_size,
        repeat=asked if _prints_text(config) else attrgetter("text") if config.include_prompt else None,
        full_depth=(lambda rows: engines.engine(max_rows=rows)) if config.compare else None,
    )


def _generate(
    source: PromptSource, form: PromptForm, config: Config, job: Job, writer: RowWriter, rows: int
) -> RunStats:
    from skipdecode.generation.run import generate_rows, refuse_bad_rows
    from skipdecode.generation.stats import BadRows

    if config.on_error == "stop":
        refuse_bad_rows(source.records(form), job.encoder)
    if writer.rows_before:
        note(f"{writer.rows_before} of {rows} records were finished by an earlier run; continuing")
    ids = SeenIds()
    shown = not (_prints_text(config) and sys.stdout.isatty())  # on a terminal, the text shows the progress
    with progress_bar(rows, "record", done=writer.rows_before, shown=shown) as bar:

        def progress(ended: int, summary: RunStats) -> None:
            bar.set_postfix_str(f"{summary.tokens_per_s:.0f} tokens/s", refresh=False)
            bar.update(ended)

        # The ids of all records are read, also of those that an earlier run finished.
        records = (r for r in ids.watch(source.records(form)) if not writer.is_done(r.index))
        summary = generate_rows(
            records, job, writer, rows - writer.rows_before, report=BadRows().add, progress=progress
        )
    if repeated := ids.repeated(source.records(form)):
        note(f"{repeated}; an output is generated for each")
    return summary


def _tell(config: Config, summary: RunStats, settings: dict[str, Any]) -> None:
    from skipdecode.generation.stats import summary_lines

    for line in summary_lines(summary):
        note(line)
    if asked := summary.short_heads + summary.head_fallbacks:
        detail(f"the 8-bit copy of the head decided {summary.short_heads} of {asked} forwards")
    if summary.comparison is not None:
        _tell_comparison(summary.comparison.to_dict())
    if config.summary is not None:
        document = {"settings": settings, "summary": summary.to_dict(), "environment": environment()}
        write_whole(config.summary, json.dumps(document, indent=2) + "\n")


def _tell_comparison(found: dict[str, Any] | None) -> None:
    """The speeds of the schedule and of full depth."""
    if found is None:
        note("no comparison: no record has a second token")
        return
    many = "1 batch" if found["batches"] == 1 else f"{found['batches']} batches"
    note(f"{many} again, in turn with full depth, all sequences of a batch with the same length:")
    cells = {}
    for name in ("decode", "request"):
        rates = [f"{found[f'{side}{name}_tokens_per_s']:.1f} tokens/s" for side in ("full_", "")]
        cells[name] = [*rates, f"{found[f'{name}_speedup']:.2f}x"]
    layers = [f"{found[f'{side}layers_per_token']:.1f} layers" for side in ("full_", "")]
    cells["nominal"] = [*layers, f"{found['nominal_speedup']:.2f}x"]
    for line in speedups(["full depth", "the schedule", "measured"], cells):
        note(line)
