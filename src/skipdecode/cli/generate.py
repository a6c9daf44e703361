"""Generate text for prompts, in batches, with fewer layers per token: text on a terminal, else JSONL.

Prompts are arguments, lines of a text file, or records of a JSONL or CSV file. A tuned checkpoint has the prompt
template that it was tuned on. The template is used for records that have its fields, and for plain texts if it has one
field; --prompt-template, --task and --no-template change this. Without a template, prompts are chats if the model has a
chat template (--no-template: texts that the model continues), and --field selects the prompt (default:
prompt, messages, text, instruction with input, input, question or mr). The chat template gets all fields of messages,
and the record's system and tools; an answer at the end of messages is left out. A note names, once, fields of records
that are not in the prompts.

An output record has the id of its prompt (field "id", else the line number), "text", "new_tokens" and "finish_reason"
(eos, length, stop, or error: a JSON schema that takes too much work); the order is that of the input. For an input
record that cannot be used, a message names the line, the output has {"id", "line", "error"} (id is null if the record
has none), and the exit code is 1. Of a line of OpenAI's batches the body's max_tokens, stop, seed and sampling fields
count, and the command's options where it has none; --output-format batch writes the batch's answers.

With --output FILE, finished records are kept in FILE.partial: after a kill or Ctrl-C, the same command continues.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.cli.options import (
    ChatOptions,
    DecodingOptions,
    EngineOptions,
    ScheduleOptions,
    choose_schedule,
    stop_text,
)
from skipdecode.common.environment import environment
from skipdecode.common.files import write_whole
from skipdecode.common.jsonl import read_json
from skipdecode.common.options import OVERWRITE, Reads, Writes, option
from skipdecode.common.progress import detail, note
from skipdecode.common.rows import FORMATS
from skipdecode.data.examples import TemplateOptions
from skipdecode.data.forms import PromptForm, choose_form
from skipdecode.data.prompts import asked
from skipdecode.data.source import PromptSource
from skipdecode.errors import UsageError
from skipdecode.generation.grammar import Grammars
from skipdecode.generation.records import RecordRun, generate_records, named_text, output_files, plain_text

if TYPE_CHECKING:
    from skipdecode.generation.stats import RunStats


@dataclass(frozen=True, kw_only=True)
class Config(RecordRun, TemplateOptions, EngineOptions, DecodingOptions, ScheduleOptions, ChatOptions):
    """Options of `skipdecode generate`."""

    EXCLUDES: ClassVar = {"prompts": ("input", "field")}

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
    template: bool = option(
        "use the template that the checkpoint was tuned on, else the model's chat template; --no-template: use prompts "
        "unchanged",
        default=True,
    )
    output: str = option("output file (JSONL), - for standard output", default="-", path=Writes(output_files))
    overwrite: bool = option(OVERWRITE, default=False)
    chat: bool = option("apply the model's chat template; lists of messages always get it", default=False)
    stop: tuple[str, ...] = option(
        r"stop string: ends the output and is cut off; \n and \t are accepted; repeat the flag for several",
        default=(),
        parse=stop_text,
    )
    json_schema: str | None = option(
        "file with a JSON schema: every text that ends by itself is JSON that the schema accepts",
        default=None,
        path=Reads(),
    )
    summary: str | None = option("file for the statistics of the run (JSON)", default=None, path=Writes())


def run(config: Config) -> int:
    """Generate; returns 0, or 1 if records could not be used."""
    _check(config)
    arguments, format = config.prompts, None if config.format == "auto" else config.format
    source = PromptSource.of_prompts(arguments) if arguments else PromptSource.open(config.input or "-", format)
    form, schema = _form(config), None
    if config.json_schema is not None:
        schema = read_json(Path(config.json_schema))
        Grammars(None, 0, ()).compile("json", schema)  # refused before weights are loaded
    rows = source.count(form, all_usable=config.on_error == "stop")
    chosen = choose_schedule(config, config.max_new_tokens)
    from skipdecode.generation.llm import LLM
    from skipdecode.generation.stats import schedule_line

    loaded = config.load()
    note(schedule_line(*chosen))
    if line := loaded.untuned_line([chosen.schedule]):
        note(line)
    llm = LLM(
        loaded,
        chosen.schedule,
        engine=config.engine,
        quantization=config.quantization,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=config.generation_config,
    )
    if form.remark is not None:
        note(form.remark)
    try:
        stats, settings = generate_records(
            llm,
            source,
            config.output,
            config,
            form=form,
            schedule=chosen.schedule,
            sampling=replace(llm.backend.sampling, **config.sampling_fields()),
            stop=config.stop or llm.backend.stop,
            exact=config.exact,
            json_schema=schema,
            shown=(named_text if rows > 1 else plain_text, asked) if _prints_text(config) else None,
        )
    finally:
        source.close()
    _tell(config, stats, settings)
    return 1 if stats.bad_rows else 0


def _check(config: Config) -> None:
    if not config.prompts and config.input is None and sys.stdin.isatty():
        raise UsageError("no prompts: give them as arguments, with --input FILE, or on standard input with --input -")
    if config.output_format == "text" and config.output != "-":
        raise UsageError("--output-format text is for standard output: leave out --output, or redirect with > FILE")


def _prints_text(config: Config) -> bool:
    automatic = config.output_format == "auto" and sys.stdout.isatty()
    return config.output == "-" and (automatic or config.output_format == "text")


def _form(config: Config) -> PromptForm:
    return choose_form(
        config.ref.recipe,
        prompt_template=config.prompt_template,
        task=config.task,
        no_template=not config.template,
        chat=config.chat or config.system is not None,
        field=config.field,
    )


def _tell(config: Config, stats: RunStats, settings: dict[str, Any]) -> None:
    from skipdecode.generation.stats import summary_lines

    for line in summary_lines(stats):
        note(line)
    if asked := stats.short_heads + stats.head_fallbacks:
        detail(f"the 8-bit copy of the head decided {stats.short_heads} of {asked} forwards")
    if stats.comparison is not None:
        for line in stats.comparison.lines():
            note(line)
        if (speedup := (stats.comparison.to_dict() or {}).get("request_speedup")) is not None:
            note(f"{speedup:.1f} times as fast as all layers")
    if config.summary is not None:
        document = {"settings": settings, "summary": stats.to_dict(), "environment": environment()}
        write_whole(config.summary, json.dumps(document, indent=2) + "\n")
