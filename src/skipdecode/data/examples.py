"""Records to learn from: options for prompt and response, files and lists of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.common.files import is_stream
from skipdecode.common.options import Options, Reads, option, setting
from skipdecode.common.progress import note
from skipdecode.data.tasks import task_file
from skipdecode.errors import DataError, UsageError

if TYPE_CHECKING:
    from skipdecode.data.prompts import Example, RecordFile
    from skipdecode.data.records import Template
    from skipdecode.models.loading.hub import LoadedModel

_HELD_OUT = 10
Source = str | Path | Sequence[Mapping[str, Any]]
"""A file of records (JSONL, CSV), or a list of records."""


def with_breaks(text: str) -> str:
    r"""`text` with \n and \t read as line end and tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


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
    max_length: int | None = setting(
        "most tokens of prompt and response together (default: the model's context)", default=None, least=1
    )

    @property
    def skips_bad(self) -> bool:
        """Whether records that cannot be used are left out."""
        return self.bad_records == "skip"


def make_template(options: RecordOptions, source: Source | None = None) -> Template:
    """The template of the options, else of the shape that the first record of the source has.

    Raises UsageError if the options have more than one, and DataError if the source has no known shape.
    """
    from skipdecode.data.records import Template
    from skipdecode.data.tasks import load_task

    given = [n for n in ("task", "prompt_template", "prompt_field") if getattr(options, n) is not None]
    read_once = isinstance(source, str | Path) and is_stream(source)
    if not given and source is not None and not read_once and options.response_field is None:
        return _of_shape(source, options.chat or None)
    if len(given) != 1:
        raise UsageError("give one of `task`, `prompt_template` and `prompt_field`")
    if options.task is not None:
        return load_task(options.task).template()
    if options.response_field is None:
        raise UsageError("`response_field` is missing: give the field of the record that is the response")
    prompt = options.prompt_template or f"{{{options.prompt_field}}}"
    return Template(prompt, options.response_field, chat=options.chat)


def _of_shape(source: Any, chat: bool | None) -> Template:
    from skipdecode.common.rows import read_rows
    from skipdecode.data.records import Template
    from skipdecode.data.shapes import left_out, shape_of

    of_file = isinstance(source, str | Path)
    where, rows = (str(source), (row for _, row in read_rows(source))) if of_file else ("the records", iter(source))
    first: Any = next((row for row in rows if isinstance(row, Mapping)), None)
    if first is None:
        raise DataError(f"{where}: no record can be read")
    shape = shape_of(first, where)
    unused = left_out(first, shape)
    note(f"{where}: records of {shape}" + (f"; left out: {', '.join(unused)}" if unused else ""))
    return Template("{prompt}", "response", chat=chat, shape=shape)


def held_out(file: RecordFile) -> tuple[RecordFile, RecordFile]:
    """The records of a file without every tenth one, and these: records that select the best weights."""
    rest = tuple(one for number, one in enumerate(file.records) if number % _HELD_OUT)
    dev = file.records[::_HELD_OUT]
    if not rest:
        raise DataError(f"{file.name}: one record is too few: a part is held out to select the best weights")
    note(f"{file.name}: {len(dev)} of {len(file.records)} records are held out to select the best weights")
    return replace(file, records=rest), replace(file, records=dev, rejects=())


def self_template(options: RecordOptions) -> Template | None:
    """The template of prompts without responses; None if the options have none."""
    named = options.task or options.prompt_template or options.prompt_field
    if not named and not options.chat:
        return None
    response, prompt = None if options.task else "response", options.prompt_field if named else "prompt"
    return make_template(replace(options, prompt_field=prompt, response_field=response))


def read_sources(
    sources: Mapping[str, Source], template: Template, limits: Mapping[str, int | None], *, skip_bad: bool
) -> dict[str, RecordFile]:
    """The records of each source, which is read once; `limits` has the most records of a source. Needs no model."""
    from skipdecode.common.rows import check_streams
    from skipdecode.data.prompts import read_file

    check_streams(str(source) for source in sources.values() if isinstance(source, str | Path))
    return {
        name: read_file(source, template, limit=limits.get(name), skip_bad=skip_bad) for name, source in sources.items()
    }


def decide_chat(template: Template, loaded: LoadedModel) -> None:
    """Have the template use chats if the model has a chat template, where the user has not said."""
    from skipdecode.data.chats import chat_fault

    if template.chat is None:
        template.chat = chat_fault(loaded.tokenizer) is None


def encode_source(
    file: RecordFile, name: str, template: Template, loaded: LoadedModel, options: RecordOptions
) -> tuple[list[Example], int]:
    """The records as token ids within the model's context, and the number of skipped ones, which a note names."""
    from skipdecode.data.prompts import context_length, encode_examples
    from skipdecode.data.records import reject_summary
    from skipdecode.models.families import vocabulary_size

    decide_chat(template, loaded)
    limits = [most for most in (options.max_length, context_length(loaded.model.config)) if most is not None]
    examples, rejects = encode_examples(
        file,
        template,
        loaded.tokenizer,
        max_length=min(limits, default=None),
        vocabulary=vocabulary_size(loaded.model),
        skip_bad=options.skips_bad,
    )
    if rejects:
        note(f"{name}: {reject_summary(rejects)}")
    return examples, len(rejects)
