"""Options for the prompt and the response of a record, for verbs that read responses."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from skipdecode.cli.options import with_breaks
from skipdecode.common.options import Options, Reads, option
from skipdecode.data.tasks import task_file
from skipdecode.errors import UsageError

if TYPE_CHECKING:
    from skipdecode.data.prompts import Example, RecordFile
    from skipdecode.data.records import Template
    from skipdecode.data.source import PromptSource
    from skipdecode.models.loading.hub import LoadedModel


C = TypeVar("C", bound=Any)
"""`RecordOptions` and `SelfGeneratedOptions` with --out and --seed."""


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """The prompt and the response of a record."""

    EXCLUDES: ClassVar = {"task": ("response_field", "chat")}

    task: str | None = option(
        "use the prompt and the response of a task: its name or its YAML file, as for skipdecode eval",
        default=None,
        path=Reads(task_file),
    )
    prompt_template: str | None = option(
        "prompt text with fields of the record in braces, such as '{mr}\\n'; \\n is a line break",
        default=None,
        parse=with_breaks,
    )
    prompt_field: str | None = option("field with the prompt, in place of a template", default=None)
    response_field: str | None = option("field with the response", default=None)
    chat: bool = option("apply the model's chat template, with the prompt as user message", default=False)
    bad_records: str = option(
        "records that cannot be used: refuse the file, or skip the records and print their lines",
        default="refuse",
        choices=("refuse", "skip"),
    )
    max_length: int | None = option(
        "most tokens of prompt and response together (default: the model's context)", default=None, least=1
    )


def make_template(options: RecordOptions) -> Template:
    """The template of the options; raises UsageError if there is none, or more than one."""
    from skipdecode.data.records import Template
    from skipdecode.data.tasks import load_task

    given = [n for n in ("task", "prompt_template", "prompt_field") if getattr(options, n) is not None]
    if len(given) != 1:
        raise UsageError("give one of --task, --prompt-template and --prompt-field")
    if options.task is not None:
        return load_task(options.task).template()
    if options.response_field is None:
        raise UsageError("--response-field is missing: give the field of the record that is the response")
    prompt = options.prompt_template or f"{{{options.prompt_field}}}"
    return Template(prompt, options.response_field, chat=options.chat)


def read_files(options: RecordOptions, template: Template, **limits: int | None) -> dict[str, RecordFile]:
    """The files of flags, each read once; `limits` has for each flag the number of lines to read. Needs no model."""
    from skipdecode.common.rows import check_streams
    from skipdecode.data.prompts import read_file

    check_streams(getattr(options, flag) for flag in limits)
    skip_bad = options.bad_records == "skip"
    return {
        flag: read_file(getattr(options, flag), template, limit=limit, skip_bad=skip_bad)
        for flag, limit in limits.items()
    }


def encode_file(
    options: RecordOptions, template: Template, loaded: LoadedModel, flag: str, file: RecordFile
) -> tuple[list[Example], int]:
    """The records of a flag's file as token ids, within the model's context, and how many are skipped.

    Prints the skipped ones. See `skipdecode.data.prompts.encode_examples`.
    """
    from skipdecode.data.prompts import context_length, encode_examples
    from skipdecode.data.records import reject_summary
    from skipdecode.models.families import vocabulary_size

    limits = [most for most in (options.max_length, context_length(loaded.model.config)) if most is not None]
    examples, rejects = encode_examples(
        file,
        template,
        loaded.tokenizer,
        max_length=min(limits, default=None),
        vocabulary=vocabulary_size(loaded.model),
        skip_bad=options.bad_records == "skip",
    )
    if rejects:
        print(f"skipdecode: --{flag}: {reject_summary(rejects)}", file=sys.stderr)
    return examples, len(rejects)


def self_template(options: RecordOptions) -> Template | None:
    """The template of the prompts of --self; None if the options have none."""
    named = options.task or options.prompt_template or options.prompt_field
    if not named and not options.chat:
        return None
    response, prompt = None if options.task else "response", options.prompt_field if named else "prompt"
    return make_template(replace(options, prompt_field=prompt, response_field=response))


def with_self_generated(
    options: C, loaded: LoadedModel, source: PromptSource | None, held_out: int, **files: str
) -> tuple[C, Template, dict[str, Any]]:
    """The options with self-generated data as records, the template, and the settings of the data.

    The data is generated in --out unless it exists; `files` has for each flag the name of the file in --out. See
    `skipdecode.tuning.self_generated.SelfGeneratedData.write_records`.
    """
    from skipdecode.common.progress import note
    from skipdecode.data.forms import recipe_template
    from skipdecode.engine.opening import open_engines
    from skipdecode.tuning.self_generated import SelfGeneratedData, SelfGeneratedOptions, default_template

    template = default_template(loaded.tokenizer, self_template(options) or recipe_template(loaded.recipe))
    engines, skip_bad = open_engines(loaded.model, "auto", note), options.bad_records == "skip"
    out = Path(options.out)
    about = template, options.part(SelfGeneratedOptions), source, out, options.seed, skip_bad
    made = SelfGeneratedData(loaded, lambda rows: engines.engine(max_rows=rows), *about).write_records(held_out)
    # An answer may be a token longer when it is read again, and then exceed the context.
    paths: dict[str, Any] = {flag: str(out / name) for flag, name in files.items()}
    return replace(options, **paths, bad_records="skip"), template, made
