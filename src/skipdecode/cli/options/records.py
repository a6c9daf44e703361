"""Options that say what prompt and response of a JSONL record are, the same for every verb that reads responses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipdecode.cli.options import with_breaks
from skipdecode.common.options import Options, option
from skipdecode.errors import UsageError

if TYPE_CHECKING:
    from skipdecode.data.prompts import Example
    from skipdecode.data.records import Template

__all__ = ["RecordOptions", "check_records", "make_template", "read_examples"]


@dataclass(frozen=True, kw_only=True)
class RecordOptions(Options):
    """What prompt and response of a record are."""

    task: str | None = option(
        "prompt and response of a task: its name or its YAML file, as skipdecode eval takes it", default=None
    )
    prompt_template: str | None = option(
        "prompt text with record fields in braces, such as '{mr}\\n'; \\n is a line break",
        default=None,
        parse=with_breaks,
    )
    prompt_field: str | None = option("the field that is the prompt, in place of a template", default=None)
    response_field: str | None = option("the field that is the response", default=None)
    chat: bool = option("put the prompt through the model's chat template as a user message", default=False)
    bad_records: str = option(
        "what to do about records that cannot be used: refuse the file, or skip them and say which",
        default="refuse",
        choices=("refuse", "skip"),
    )
    max_length: int | None = option(
        "most tokens of prompt and response (default: the model's context)", default=None, least=1
    )


def make_template(options: RecordOptions) -> Template:
    """The template that the options name; raises UsageError if they name none or contradict each other."""
    from skipdecode.data.records import Template
    from skipdecode.data.tasks import load_task

    given = [n for n in ("task", "prompt_template", "prompt_field") if getattr(options, n) is not None]
    if len(given) != 1:
        raise UsageError("give --task, --prompt-template or --prompt-field, one of the three")
    if options.task is not None:
        if options.response_field is not None or options.chat:
            raise UsageError("--task says what prompt and response are: it takes no --response-field and no --chat")
        return load_task(options.task).template()
    if options.response_field is None:
        raise UsageError("--response-field is missing: name the field of the record that is the response")
    prompt = options.prompt_template or f"{{{options.prompt_field}}}"
    return Template(prompt, options.response_field, chat=options.chat)


def check_records(options: RecordOptions, *flags: str) -> None:
    """Refuse, before a model is loaded, a template that names nothing, and files that cannot be read at all."""
    from skipdecode.common.rows import read_rows

    make_template(options)
    for flag in flags:
        next(read_rows(Path(getattr(options, flag))), None)


def read_examples(
    options: RecordOptions, template: Template, flag: str, model: Any, tokenizer: Any, limit: int | None = None
) -> tuple[list[Example], int]:
    """The records of a flag's file as token ids, within the model's context, and how many are left out, which is told.

    See `skipdecode.data.prompts.load_examples`.
    """
    from skipdecode.data.prompts import context_length, load_examples
    from skipdecode.data.records import reject_summary

    limits = [most for most in (options.max_length, context_length(model.config)) if most is not None]
    examples, rejects = load_examples(
        Path(getattr(options, flag)),
        template,
        tokenizer,
        max_length=min(limits, default=None),
        limit=limit,
        skip_bad=options.bad_records == "skip",
    )
    if rejects:
        print(f"skipdecode: --{flag}: {reject_summary(rejects)}", file=sys.stderr)
    return examples, len(rejects)
