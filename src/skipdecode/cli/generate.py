"""Generate text for prompts, in batches, with fewer layers per token: text on a terminal, else JSONL.

Prompts are arguments, lines of a text file, or records of a JSONL or CSV file. A tuned checkpoint has the prompt
template that it was tuned on. The template is used for records that have its fields, and for plain texts if it has one
field; --prompt-template, --task and --no-template change this. Without a template, prompts are chats if the model has a
chat template (--no-template: texts that the model continues), and --prompt-field selects the prompt (default: prompt,
messages, conversations, text, instruction with input, input, question or mr). The chat template gets all fields of
messages, and the record's system and tools; an answer at the end of messages is left out. A note names, once, fields of
records that are not in the prompts.

An output record has the id of its prompt (field "id", else the line number), "text", "new_tokens" and "finish_reason"
(eos, length, stop, or error: a JSON schema that takes too much work); the order is that of the input. For an input
record that cannot be used, a message names the line, the output has {"id", "line", "error"} (id is null if the record
has none), and the exit code is 1. Of a line of OpenAI's batches the body's max_tokens, stop, seed and sampling fields
count, and the command's options where it has none; --output-format batch writes the batch's answers.

With --output FILE, finished records are kept in FILE.partial: after a kill or Ctrl-C, the same command continues.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
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
from skipdecode.common.jsonl import Json, json_line, read_json
from skipdecode.common.options import OVERWRITE, Reads, Writes, option, setting
from skipdecode.common.progress import detail, note, progress_bar
from skipdecode.common.rows import FORMATS, PACKED_SUFFIXES, TABLE_SUFFIXES
from skipdecode.data.examples import PromptOptions, bad_records_option, choose_template
from skipdecode.data.prompts import EncodedPrompt
from skipdecode.data.records import Record
from skipdecode.data.source import ARGUMENTS, PromptSource
from skipdecode.data.stopping import StopStrings
from skipdecode.data.template import PromptTemplate
from skipdecode.engine.requests import BATCH, SamplingOptions
from skipdecode.errors import DataError, GrammarError, UsageError
from skipdecode.generation.batch_lines import answer_line, prompt_reader
from skipdecode.generation.decoding import Decoding, Output
from skipdecode.generation.grammar import Grammars
from skipdecode.generation.output_files import (
    WINDOW_BATCHES,
    LineFormat,
    RowWriter,
    named_text,
    open_writer,
    output_files,
    plain_text,
)
from skipdecode.models.loading.checkpoint import served_name
from skipdecode.models.loading.identity import checkpoint_digest

if TYPE_CHECKING:  # torch is imported with the model, so that --help stays quick
    from skipdecode.generation.llm import LLM
    from skipdecode.generation.stats import RunStats

_NO_LINES = (".csv", ".tsv", ".xlsx", *TABLE_SUFFIXES, *PACKED_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class Config(PromptOptions, EngineOptions, DecodingOptions, ScheduleOptions, ChatOptions):
    EXCLUDES: ClassVar = {"prompts": ("input", "prompt_field")}

    bad_records: str = bad_records_option("skip")
    system: str | None = option("system message of every chat; implies --chat", default=None)
    output_format: str = option(
        "format of the output; auto: text on a terminal (after its prompt if there are several), else JSONL; batch: "
        "the lines of a result of OpenAI's batches",
        default="auto",
        choices=("auto", "jsonl", "text", "batch"),
    )
    name: str | None = setting("name of the model in a batch's lines (default: the last part of MODEL)", default=None)
    include_prompt: bool = option("add the prompt to each output record", default=False)
    max_new_tokens: int = option("most new tokens of a record", default=128, least=1)
    batch_size: int = option("sequences decoded together", default=BATCH, least=1)
    compare: bool = option(
        "afterwards run up to 4 batches again, three times in turn with full depth, and print both speeds",
        default=False,
    )
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
    template: bool = option(
        "use the template that the checkpoint was tuned on, else the model's chat template; --no-template: use prompts "
        "unchanged",
        default=True,
    )
    output: str = option("output file (JSONL), - for standard output", default="-", path=Writes(output_files))
    overwrite: bool = option(OVERWRITE, default=False)
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
    with closing(_source(config)) as source:
        tuned, schema = config.checkpoint.recipe.template, None
        chosen = choose_template(config, tuned, plain=not config.template, system=config.system)
        read = prompt_reader(chosen)
        if config.json_schema is not None:
            schema = _schema(config.json_schema)
        rows, first = source.count(read, all_usable=not config.skips_bad)
        llm = _loaded(config)
        template = llm.resolve_template(chosen)
        encoder = llm.encoder(template)
        if first.guessed_fields and source.name != ARGUMENTS:
            note(f"{source.name}: records of {first.guessed_fields}")
        _note_template(config, template, tuned)
        decoding = Decoding(
            sampling=llm.constrained(replace(llm.backend.sampling, **config.sampling_fields()), schema),
            max_new_tokens=config.max_new_tokens,
            stop=StopStrings(config.stop or llm.backend.stop),
            exact=config.exact,
        )
        settings = _settings(config, llm, decoding) | ({} if schema is None else {"json_schema": schema})
        settings |= {"template": None if template.text is None else template.to_dict(), "chat": template.chat}
        settings["input"] = source.fingerprint | {"field": config.prompt_field}
        line_format: LineFormat = json_line
        if _prints_text(config):
            line_format = named_text if rows > 1 else plain_text
        with closing(open_writer(config.output, settings, form=line_format)) as writer:
            try:
                records: Iterable[Record] = source.records(read)
                if config.skips_bad:
                    records = (record for record in records if not writer.is_done(record.index))
                prompts: Iterable[EncodedPrompt] = encoder.stream(records, WINDOW_BATCHES * config.batch_size)
                if not config.skips_bad:
                    usable = _all_usable(llm, prompts, decoding)
                    prompts = (prompt for prompt in usable if not writer.is_done(prompt.record.index))
                stats = _write_outputs(config, llm, prompts, decoding, writer, rows)
            except KeyboardInterrupt as stop:
                raise type(stop)(f": {writer.resume_hint}") from None
    _print_summary(config, stats, settings)
    return 1 if stats.bad_rows else 0


def _check(config: Config) -> None:
    if not config.prompts and config.input is None and sys.stdin.isatty():
        raise UsageError("no prompts: give them as arguments, with --input FILE, or on standard input with --input -")
    if file := next(filter(os.path.isfile, config.prompts), None):
        raise UsageError(f"the prompt {file!r} is the name of a file: give --input {file}, or prompts by --input -")
    if config.output.lower().endswith(_NO_LINES):
        raise UsageError(f"--output {config.output} is written as JSON lines: give a name that ends in .jsonl")
    if config.output_format == "text" and config.output != "-":
        raise UsageError("--output-format text is for standard output: leave out --output, or redirect with > FILE")


def _source(config: Config) -> PromptSource:
    if config.prompts:
        return PromptSource.of_prompts(config.prompts)
    format = None if config.format == "auto" else config.format
    return PromptSource.open(config.input or "-", format, config.prompt_field or "prompt")


def _schema(file: str) -> Any:
    """The JSON schema in a file, which is refused before weights are loaded."""
    schema = read_json(Path(file))
    try:
        Grammars(None, 0, ()).compile("json", schema)
    except GrammarError as e:
        raise UsageError(f"{file}: {e}") from None
    return schema


def _prints_text(config: Config) -> bool:
    automatic = config.output_format == "auto" and sys.stdout.isatty()
    return config.output == "-" and (automatic or config.output_format == "text")


def _loaded(config: Config) -> LLM:
    """The model under the schedule of the command."""
    schedule, origin = choose_schedule(config, config.schedule, config.max_new_tokens)
    from skipdecode.generation.stats import schedule_line

    loaded = config.load()
    note(schedule_line(schedule, origin))
    if line := loaded.untuned_line([schedule]):
        note(line)
    return config.llm(
        loaded,
        schedule,
        max_rows=config.batch_size,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=config.generation_config,
    )


def _note_template(config: Config, template: PromptTemplate, tuned: PromptTemplate | None) -> None:
    """Note what prompts are made of, where the user has not said it."""
    is_default = config.template and config.task is None and config.prompt_template is None
    back = "(--no-template leaves them as they are)"
    if config.task is not None:
        note(f"prompts go into the task's template {template.text!r}")
    elif is_default and tuned is not None and template.text is None:
        note(f"prompts go as chats, as asked; the checkpoint was tuned on the template {tuned.text!r} without chat")
    elif is_default and tuned is not None:
        through = " and the chat template" if tuned.chat else ""
        note(f"prompts go into the checkpoint's template {tuned.text!r}{through} {back}")
    elif is_default and template.chat and not config.chat and config.system is None:
        note(f"prompts go into the model's chat template {back}")


def _settings(config: Config, llm: LLM, decoding: Decoding) -> Json:
    """What the output depends on beside the input, JSON-ready."""
    return {
        "model": llm.loaded.checkpoint.name,
        "max_new_tokens": config.max_new_tokens,
        **asdict(decoding.sampling.part(SamplingOptions)),
        **({"chat_template_kwargs": llm.variables} if llm.variables else {}),
        "stop": list(decoding.stop),
        "system": config.system,
        "include_prompt": config.include_prompt,
        **({"output_format": "batch"} if config.output_format == "batch" else {}),
        "schedule": llm.schedule_of(None).to_dict(),
        # "auto" depends on the machine, as does the engine.
        "dtype": str(llm.loaded.model.dtype).removeprefix("torch."),
        "engine": llm.backend.name,
        "checkpoint": checkpoint_digest(llm.loaded),
    }


def _all_usable(llm: LLM, prompts: Iterable[EncodedPrompt], decoding: Decoding) -> list[EncodedPrompt]:
    """Hold all prompts; raises DataError at the first that cannot be used, before anything is generated."""
    usable = []
    for prompt in prompts:
        try:
            llm.make_request(prompt, decoding)
        except DataError as e:
            raise DataError(str(e), prompt.record.line) from None
        usable.append(prompt)
    return usable


def _write_outputs(
    config: Config, llm: LLM, prompts: Iterable[EncodedPrompt], decoding: Decoding, writer: RowWriter, rows: int
) -> RunStats:
    """Write the output of each prompt, in the order in which they end, and put the output file in place."""
    from skipdecode.generation.speed import MOST_BATCHES, Method, SpeedComparison
    from skipdecode.generation.stats import note_bad

    done, size = writer.rows_before, config.batch_size
    if done:
        note(f"{done} of {rows} records were finished by an earlier run; continuing")
    every = max(1, (rows - done) // (MOST_BATCHES * size))
    compared: list[Output] = []
    # On a terminal, the text shows the progress.
    with progress_bar(rows, "record", done=done, shown=not (_prints_text(config) and sys.stdout.isatty())) as bar:
        for number, output in enumerate(llm.iterate(prompts, decoding, window=WINDOW_BATCHES * size)):
            if output.error is not None:
                note_bad(output, llm.stats.bad_rows)
            writer.put(output.index, _line(config, llm, output), bad=output.error is not None)
            if config.compare and number % every == 0:
                compared.append(output)
            bar.set_postfix_str(f"{llm.stats.tokens_per_s:.0f} tokens/s", refresh=False)
            bar.update()
    stats = llm.stats
    stats.rows += done
    stats.bad_rows += writer.bad_before
    stats.rows_resumed = done
    if config.compare:
        # Before the output is put in place, so that an interrupted comparison can be resumed.
        method = Method(llm.backend, llm.schedule_of(None), exact=config.exact)
        full = Method(llm.backend, exact=config.exact)
        stats.comparison = SpeedComparison.of(compared, method, full, size)
    writer.finish()
    return stats


def _line(config: Config, llm: LLM, output: Output) -> Mapping[str, object]:
    """The output record, in the format of the output."""
    if config.output_format == "batch":
        return answer_line(output, config.name or served_name(llm.loaded.checkpoint.name), llm.tokenizer)
    if _prints_text(config):
        prompt = output.source.record.prompt
        return output.to_record(prompt if isinstance(prompt, str) else prompt[-1]["content"])
    return output.to_record(output.prompt if config.include_prompt else None)


def _print_summary(config: Config, stats: RunStats, settings: Json) -> None:
    for line in str(stats).splitlines():
        note(line)
    if forwards := stats.short_heads + stats.head_fallbacks:
        detail(f"the 8-bit copy of the head decided {stats.short_heads} of {forwards} forwards")
    if stats.comparison is not None:
        for line in stats.comparison.lines():
            note(line)
        if (speedup := (stats.comparison.to_dict() or {}).get("request_speedup")) is not None:
            note(f"{speedup:.1f} times as fast as all layers")
    if config.summary is not None:
        document = {"settings": settings, "summary": stats.to_dict(), "environment": environment()}
        write_whole(config.summary, json.dumps(document, indent=2) + "\n")
