"""Output records for the records of a file: what `skipdecode generate` does, as a function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from skipdecode.common.jsonl import json_line
from skipdecode.common.options import Options, option
from skipdecode.common.progress import note, progress_bar
from skipdecode.data.forms import PromptForm
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder
from skipdecode.data.source import PromptSource
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.requests import Sampling, SamplingOptions
from skipdecode.generation.output import RowForm, RowWriter, open_writer
from skipdecode.models.families import vocabulary_size
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.models.loading.ref import served_name
from skipdecode.schedule import Schedule

if TYPE_CHECKING:  # torch is imported with the model, so that the command line's --help stays quick
    from skipdecode.generation.llm import LLM
    from skipdecode.generation.run import Job
    from skipdecode.generation.stats import RunStats


@dataclass(frozen=True, kw_only=True)
class RecordRun(Options):
    """How output records are made from the records of an input."""

    on_error: str = option(
        "records that cannot be used: skip them and write the error in their place, or stop before any work",
        default="skip",
        choices=("skip", "stop"),
    )
    system: str | None = option("system message of every chat; implies --chat", default=None)
    output_format: str = option(
        "format of the output; auto: text on a terminal (after its prompt if there are several), else JSONL; batch: "
        "the lines of a result of OpenAI's batches",
        default="auto",
        choices=("auto", "jsonl", "text", "batch"),
    )
    include_prompt: bool = option("add the prompt to each output record", default=False)
    max_new_tokens: int = option("most new tokens of a record", default=128, least=1)
    batch_size: int = option("sequences decoded together", default=8, least=1)
    compare: bool = option(
        "afterwards run up to 8 batches again, in turn with full depth, and print both speeds",
        default=False,
    )


def generate_records(
    llm: LLM,
    source: PromptSource,
    output: str,
    options: RecordRun,
    *,
    form: PromptForm,
    schedule: Schedule,
    sampling: Sampling,
    stop: tuple[str, ...] = (),
    exact: bool = True,
    json_schema: Any = None,
    shown: tuple[RowForm, Callable[[EncodedPrompt], str]] | None = None,
) -> tuple[RunStats, dict[str, Any]]:
    """Generate for all records of a source, and write the output records in its order.

    `output`: a file, whose finished records outlive a kill (the same call continues), or ``-`` for standard output.
    `json_schema`: as of `LLM.generate`. `shown`: for a terminal: how an output record is formatted, and what it repeats
    of its prompt.

    Returns
    -------
    RunStats, dict
        The statistics of the run, and all that its output depends on, JSON-ready.

    Raises SkipDecodeError: with `on_error` "stop", a record cannot be used; the output cannot be written; it is of a
    run with other settings; KeyboardInterrupt: after a note of what is kept.
    """
    from skipdecode.engine.opening import end_tokens
    from skipdecode.generation.run import Job, refuse_bad_rows

    rows = source.count(form, all_usable=options.on_error == "stop")
    if form.guessed is not None and source.name != "arguments":
        note(f"{source.name}: records of {form.guessed}")
    model, tokenizer = llm.loaded.model, llm.tokenizer
    encoder = PromptEncoder(
        tokenizer,
        llm.context,
        chat=form.chat,
        system=options.system,
        template=form.template,
        vocabulary=vocabulary_size(model),
        variables=llm.variables,
    )
    if form.chat is None and encoder.chat:
        note("prompts go into the model's chat template (--no-template leaves them as they are)")
    repeat = shown[1] if shown else attrgetter("text") if options.include_prompt else None
    settings = {
        "model": llm.loaded.name,
        "max_new_tokens": options.max_new_tokens,
        **asdict(sampling.part(SamplingOptions)),
        **({} if json_schema is None else {"json_schema": json_schema}),
        **({"chat_template_kwargs": llm.variables} if llm.variables else {}),
        "stop": list(stop),
        "template": None if form.template is None else form.template.to_dict(),
        "chat": encoder.chat,
        "system": options.system,
        "include_prompt": options.include_prompt,
        **({"output_format": "batch"} if options.output_format == "batch" else {}),
        "schedule": schedule.to_dict(),
        "input": source.fingerprint | {"field": form.name},
        "dtype": str(model.dtype).removeprefix("torch."),  # "auto" depends on the machine, as does the engine
        "engine": llm.backend.name,
        "checkpoint": checkpoint_digest(llm.loaded),
    }
    job = Job(
        texts=llm.texts,
        sampling=llm.constrained(sampling, json_schema),
        max_new_tokens=options.max_new_tokens,
        ends=end_tokens(model, tokenizer),
        stop=StopStrings(stop),
        exact=exact,
        grammars=llm.grammars,
        encoder=encoder,
        make_engine=lambda rows: llm.backend.engine(schedule, max_rows=rows),
        batch_size=options.batch_size,
        repeat=repeat,
        answers_of=served_name(llm.loaded.name) if options.output_format == "batch" else None,
        full_depth=(lambda rows: llm.backend.engine(max_rows=rows)) if options.compare else None,
    )
    writer = open_writer(output, settings, form=shown[0] if shown else json_line)
    try:
        if options.on_error == "stop":
            refuse_bad_rows(source.records(form), job)
        return _run(source, form, job, writer, rows, quiet=shown is not None and sys.stdout.isatty()), settings
    except KeyboardInterrupt:
        note(f"interrupted: {writer.resume_hint}")
        raise
    finally:
        writer.close()


def _run(source: PromptSource, form: PromptForm, job: Job, writer: RowWriter, rows: int, *, quiet: bool) -> RunStats:
    """`generate_rows` with a progress bar, and a note of what is resumed."""
    from skipdecode.generation.run import generate_rows
    from skipdecode.generation.stats import BadRows

    if writer.rows_before:
        note(f"{writer.rows_before} of {rows} records were finished by an earlier run; continuing")
    # `quiet`: on a terminal, the text shows the progress.
    with progress_bar(rows, "record", done=writer.rows_before, shown=not quiet) as bar:

        def progress(ended: int, stats: RunStats) -> None:
            bar.set_postfix_str(f"{stats.tokens_per_s:.0f} tokens/s", refresh=False)
            bar.update(ended)

        records = (r for r in source.records(form) if not writer.is_done(r.index))
        return generate_rows(records, job, writer, rows - writer.rows_before, report=BadRows().add, progress=progress)
