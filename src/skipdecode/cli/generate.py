"""Text for every prompt, in batches, with fewer layers per token: prompts in, text on a terminal or JSONL out.

Prompts are arguments, or lines of a text file, or rows of a JSONL or CSV file. A tuned checkpoint knows the template of
the prompts that it was tuned on: rows that have its fields are put into it, and so are plain texts where it has one
field (--prompt-template, --task and --no-template say otherwise). A row of JSONL has the id of its prompt (field "id",
else the line number), "text", "new_tokens" and "finish_reason" (eos, length or stop), in the order of the input. A row
that cannot be used is reported with its line and written as {"id", "line", "error"}; the exit code is then 1.

With --output FILE finished rows are kept in FILE.partial: after a kill or Ctrl-C the same command goes on where it
stopped.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.arguments import flag
from skipdecode.cli.columns import speedups
from skipdecode.cli.options import (
    DecodingOptions,
    EngineOptions,
    ScheduleChoice,
    ScheduleOptions,
    choose_schedule,
    named_schedule,
    stop_text,
    with_breaks,
)
from skipdecode.cli.paths import OVERWRITE
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import json_line
from skipdecode.common.options import Reads, Writes, option
from skipdecode.common.progress import note, progress_bar
from skipdecode.common.rows import FORMATS
from skipdecode.data.forms import PromptForm, choose_form
from skipdecode.data.output import RowWriter, named_text, open_writer, partial_path, plain_text
from skipdecode.data.prompts import PromptEncoder, asked, context_length
from skipdecode.data.records import SeenIds
from skipdecode.data.source import PromptSource
from skipdecode.data.stopping import StopStrings
from skipdecode.data.tasks import task_file
from skipdecode.engine.requests import Sampling
from skipdecode.errors import UsageError
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.models.loading.hub import LoadedModel

if TYPE_CHECKING:
    from skipdecode.data.run import Job
    from skipdecode.data.summary import RunSummary
    from skipdecode.engine.base import Engine
    from skipdecode.engine.opening import Backend
    from skipdecode.engine.router import Router

__all__ = ["Config", "run"]


def _output_files(output: str) -> list[Path]:
    return [Path(output), partial_path(output)]


@dataclass(frozen=True, kw_only=True)
class Config(EngineOptions, DecodingOptions, ScheduleOptions):
    """Options of `skipdecode generate`."""

    prompts: tuple[str, ...] = option("prompts, instead of --input", positional=True, default=())
    input: str | None = option(
        "file of prompts, - for standard input (which is also read if no prompt is given and it is no terminal)",
        default=None,
        path=Reads(),
    )
    format: str = option(
        "of the input; auto: CSV with a header for .csv and .tsv, JSONL for .jsonl, .ndjson and .json, and for "
        "standard input that starts with {, else one prompt a line",
        default="auto",
        choices=("auto", *FORMATS, "txt"),
    )
    field: str | None = option(
        "field that holds the prompt (default: the template's, else prompt, messages, text, input, question or mr)",
        default=None,
    )
    prompt_template: str | None = option(
        "prompt text with fields of the row in braces, such as '{mr}\\n'; \\n is a line break (default: the template "
        "that the checkpoint was tuned on)",
        default=None,
        parse=with_breaks,
    )
    task: str | None = option(
        "take the prompt of a task: its name or its YAML file", default=None, path=Reads(task_file)
    )
    template: bool = option(
        "put prompts into the template that the checkpoint was tuned on; --no-template leaves them as they are",
        default=True,
    )
    output: str = option("JSONL file, - for standard output", default="-", path=Writes(_output_files))
    output_format: str = option(
        "of standard output; auto: text on a terminal (below its prompt if there are several), else JSONL, as in files",
        default="auto",
        choices=("auto", "jsonl", "text"),
    )
    overwrite: bool = option(OVERWRITE, default=False)
    restart: bool = option("drop what an interrupted run left in FILE.partial", default=False)
    on_error: str = option(
        "bad rows: skip them (and write the error in their place), or stop at the first",
        default="skip",
        choices=("skip", "stop"),
    )
    chat: bool = option("put prompts into the model's chat template; lists of messages always are", default=False)
    system: str | None = option("system message in front of every chat; implies --chat", default=None)
    include_prompt: bool = option("repeat the prompt in the row of JSONL", default=False)
    max_new_tokens: int = option("most new tokens a row", default=128, least=1)
    batch_size: int = option("rows decoded together", default=8, least=1)
    stop: tuple[str, ...] = option(
        r"text that ends a row, cut off; \n and \t are understood; for more texts repeat the flag",
        default=(),
        parse=stop_text,
    )
    compare: bool = option(
        "also run full depth on up to 8 batches afterwards, alternating, and print both speeds",
        default=False,
    )
    router: str | None = option(
        "file of skipdecode calibrate --router: it chooses a schedule for each prompt, in place of --schedule and "
        "--nominal-speedup; the row of JSONL names it",
        default=None,
        path=Reads(),
    )
    summary: str | None = option("file for the run's figures as JSON", default=None, path=Writes())


def run(config: Config) -> int:
    """Generate; returns 0, 1 if rows were bad, or 130 if interrupted."""
    _check(config)
    router, source, form = _router(config), _source(config), _form(config)
    ref, rows = config.ref, source.count(form, all_usable=config.on_error == "stop")
    chosen = router or choose_schedule(
        config, ref.num_layers, carried=ref.schedule, default_seq_len=config.max_new_tokens
    )
    loaded = config.load()
    _tell_schedules(config, chosen, loaded)
    engines = config.engines(loaded)
    if form.remark is not None:
        note(form.remark)
    fingerprint = _fingerprint(config, source, form, chosen, loaded, engines)
    shown = json_line if not _prints_text(config) else named_text if rows > 1 else plain_text
    writer = open_writer(config.output, fingerprint, restart=config.restart, form=shown)
    try:
        summary = _generate(source, form, config, _job(config, loaded, form, engines, chosen), writer, rows)
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
    if config.prompts and config.input is not None:
        raise UsageError("prompts were given both as arguments and with --input: give one of them")
    if not config.prompts and config.input is None and sys.stdin.isatty():
        raise UsageError("no prompts: give some as arguments, or --input FILE, or --input - for standard input")
    if config.prompts and config.field is not None:
        raise UsageError("--field belongs to JSONL and CSV input, not to prompts given as arguments")
    if config.output_format == "text" and config.output != "-":
        raise UsageError("--output-format text is of standard output: leave out --output, or redirect with > FILE")
    named_schedule(config)


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


def _router(config: Config) -> Router | None:
    if config.router is None:
        return None
    for name in ("schedule", "nominal_speedup", "prompt_layers"):
        if getattr(config, name) is not None:
            raise UsageError(f"--router chooses the schedule of each prompt: leave out {flag(name)}")
    if config.compare:
        raise UsageError("--compare times one schedule, and --router chooses among several: leave out one of them")
    from skipdecode.engine.router import Router

    router = Router.load(Path(config.router))
    router.schedules[0].check_fits(config.ref.num_layers)
    return router


def _tell_schedules(config: Config, chosen: ScheduleChoice | Router, loaded: LoadedModel) -> None:
    from skipdecode.data.summary import schedule_line

    if isinstance(chosen, ScheduleChoice):
        note(schedule_line(*chosen))
        schedules = [chosen.schedule]
    else:
        schedules = list(chosen.schedules)
        note(f"router {config.router}: each prompt runs one of {', '.join(each.name for each in schedules)}")
    if not config.exact and (line := loaded.untuned_line(schedules)):
        note(line)


def _fingerprint(
    config: Config,
    source: PromptSource,
    form: PromptForm,
    chosen: ScheduleChoice | Router,
    loaded: LoadedModel,
    engines: Backend,
) -> dict[str, Any]:
    """All that the output rows depend on; not how they are batched, so that a run may go on with smaller batches."""
    schedule = chosen.schedule if isinstance(chosen, ScheduleChoice) else chosen
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
        "dtype": str(loaded.model.dtype).removeprefix("torch."),  # what "auto" stands for here, and so the engine
        "engine": engines.name,
        "checkpoint": checkpoint_digest(loaded),
    }


# ---------------------------------------------------------------------- the run


def _job(
    config: Config, loaded: LoadedModel, form: PromptForm, engines: Backend, chosen: ScheduleChoice | Router
) -> Job:
    from skipdecode.data.detokenizer import TokenTexts
    from skipdecode.data.run import Job
    from skipdecode.engine.opening import end_tokens

    def make_engine(rows: int) -> Engine:
        if isinstance(chosen, ScheduleChoice):
            return engines.engine(chosen.schedule, max_rows=rows)
        return engines.for_order(chosen.order, max_rows=rows)

    tokenizer, context = loaded.tokenizer, context_length(loaded.model.config)
    chat = config.chat or config.system is not None
    return Job(
        texts=TokenTexts(tokenizer),
        sampling=Sampling(**config.sampling_fields()),
        max_new_tokens=config.max_new_tokens,
        ends=end_tokens(loaded.model, tokenizer),
        stop=StopStrings(config.stop),
        exact=config.exact,
        encoder=PromptEncoder(tokenizer, context, chat=chat, system=config.system, template=form.template),
        make_engine=make_engine,
        route=None if isinstance(chosen, ScheduleChoice) else chosen.bind(loaded.model),
        batch_size=config.batch_size,
        repeat=asked if _prints_text(config) else attrgetter("text") if config.include_prompt else None,
        full_depth=(lambda rows: engines.engine(max_rows=rows)) if config.compare else None,
    )


def _generate(
    source: PromptSource, form: PromptForm, config: Config, job: Job, writer: RowWriter, rows: int
) -> RunSummary:
    from skipdecode.data.run import generate_rows, refuse_bad_rows
    from skipdecode.data.summary import BadRows

    if config.on_error == "stop":
        refuse_bad_rows(source.records(form), job.encoder)
    if writer.rows_before:
        note(f"{writer.rows_before} of {rows} rows were finished by an earlier run; going on from there")
    ids = SeenIds()
    shown = not (_prints_text(config) and sys.stdout.isatty())  # there the text itself is the progress
    with progress_bar(rows, "row", done=writer.rows_before, shown=shown) as bar:

        def progress(ended: int, summary: RunSummary) -> None:
            bar.set_postfix_str(f"{summary.tokens_per_s:.0f} tokens/s", refresh=False)
            bar.update(ended)

        # All rows are read for their ids, those too that an earlier run finished.
        records = (r for r in ids.watch(source.records(form)) if not writer.is_done(r.index))
        summary = generate_rows(
            records, job, writer, rows - writer.rows_before, report=BadRows().add, progress=progress
        )
    if repeated := ids.repeated(source.records(form)):
        note(f"{repeated}; all are generated, in order")
    return summary


def _tell(config: Config, summary: RunSummary, settings: dict[str, Any]) -> None:
    from skipdecode.data.summary import summary_lines

    for line in summary_lines(summary):
        note(line)
    if summary.comparison is not None:
        _tell_comparison(summary.comparison.to_dict())
    if config.summary is not None:
        document = {"settings": settings, "summary": summary.to_dict(), "environment": environment()}
        write_whole(config.summary, json.dumps(document, indent=2) + "\n")


def _tell_comparison(found: dict[str, Any] | None) -> None:
    """The schedule's speed next to full depth's, as three numbers that are easily taken for one."""
    if found is None:
        note("no comparison: no row took a second token")
        return
    many = "1 batch" if found["batches"] == 1 else f"{found['batches']} batches"
    note(f"{many} once more, in turn with full depth, all rows of a batch to the same length:")
    cells = {
        "decode": (
            "{full_decode_tokens_per_s:.1f} tokens/s",
            "{decode_tokens_per_s:.1f} tokens/s",
            "{measured_decode_speedup:.2f}x",
        ),
        "request": (
            "{full_request_tokens_per_s:.1f} tokens/s",
            "{request_tokens_per_s:.1f} tokens/s",
            "{measured_request_speedup:.2f}x",
        ),
        "nominal": ("{full_layers_per_token:.1f} layers", "{layers_per_token:.1f} layers", "{nominal_speedup:.2f}x"),
    }
    filled = {name: [form.format_map(found) for form in forms] for name, forms in cells.items()}
    for line in speedups(["full depth", "the schedule", "measured"], filled):
        note(line)
