"""Records to learn from: options for prompt and response, files and lists of them, and their token ids.

Every record that cannot be used is reported with its line; the caller refuses the file or leaves the record out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from skipdecode.common.files import is_stream
from skipdecode.common.jsonl import json_line, row_of
from skipdecode.common.options import Options, Reads, option, setting
from skipdecode.common.progress import note
from skipdecode.common.rows import Input, check_streams, read_rows
from skipdecode.data.chats import chat_fault, response_ids, turn_text
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder, check_end_token, context_length, outside
from skipdecode.data.records import Record, Reject, Template, read_records, refuse_rejects, reject_summary, usable
from skipdecode.data.shapes import TEXT, Shape, shape_of, shaped
from skipdecode.data.tasks import load_task, task_file
from skipdecode.errors import DataError, UsageError
from skipdecode.models.families import vocabulary_size

if TYPE_CHECKING:  # imports torch
    from skipdecode.models.loading.checkpoint import LoadedModel

_REMEDY = "give a `task`, or `prompt_field` (or `prompt_template`) with `response_field`"
_ANSWERS = "`self` learns the model's own answers to `prompts`"
_HELD_OUT = 10
_TOKENIZE_AT_ONCE = 1000
Source = str | Path | Sequence[Mapping[str, Any]]
"""A file of records (JSONL, CSV), or a list of records."""


def with_breaks(text: str) -> str:
    r"""`text` with \n and \t read as line end and tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


@dataclass(frozen=True, kw_only=True)
class TemplateOptions(Options):
    """Options of making a prompt of a record."""

    task: str | None = option(
        "use the prompt (and the response) of a task: its name or its YAML file, as for skipdecode eval",
        default=None,
        path=Reads(task_file),
    )
    prompt_template: str | None = option(
        "prompt text with fields of the record in braces, such as '{mr}\\n'; \\n is a line break",
        default=None,
        parse=with_breaks,
    )


@dataclass(frozen=True, kw_only=True)
class RecordOptions(TemplateOptions):
    """The prompt and the response of a record."""

    EXCLUDES: ClassVar = {"task": ("response_field", "chat")}

    prompt_field: str | None = option(
        "field with the prompt, in place of a template; it goes into the model's chat template, if there is one",
        default=None,
    )
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

    given = [n for n in ("task", "prompt_template", "prompt_field") if getattr(options, n) is not None]
    read_once = isinstance(source, str | Path) and is_stream(source)
    if not given and source is not None and not read_once and options.response_field is None:
        shape = known_shape(source, _REMEDY, _ANSWERS)
        return Template("{prompt}", "response", chat=options.chat or (False if shape is TEXT else None), shape=shape)
    if len(given) != 1:
        raise UsageError("give one of `task`, `prompt_template` and `prompt_field`")
    if options.task is not None:
        return load_task(options.task).template()
    if options.response_field is None:
        raise UsageError("`response_field` is missing: give the field of the record that is the response")
    if options.prompt_template is not None:
        return Template(options.prompt_template, options.response_field, chat=options.chat)
    return Template(f"{{{options.prompt_field}}}", options.response_field, chat=options.chat or None)


def known_shape(source: Any, remedy: str, answers: str, template: Template | None = None) -> Shape | None:
    """The shape of the records of a source, which a note names; None if they are written for the template.

    Records that can be read only once are taken as written for it. `remedy`, `answers` and the errors are those of
    `skipdecode.data.shapes.shape_of`.
    """
    where, rows = "the records", source
    is_file = isinstance(source, str | Path)
    if template is not None and (is_stream(source) if is_file else not isinstance(source, Sequence)):
        return None
    if is_file:
        where, rows = str(source), (row for _, row in read_rows(source))
    elif not isinstance(source, Sequence):
        raise UsageError("records are read several times, so they cannot be an iterator: give a list or a file")
    shape, first = shape_of(rows, where, remedy, answers, template.fits if template else lambda row: False)
    if shape is not None:
        unused = shape.left_out(first)
        note(f"{where}: records of {shape.name}" + (f"; left out: {', '.join(unused)}" if unused else ""))
    return shape


def self_template(options: RecordOptions) -> Template | None:
    """The template of prompts without responses; None if the options have none."""
    named = options.task or options.prompt_template or options.prompt_field
    if not named and not options.chat:
        return None
    response, prompt = None if options.task else "response", options.prompt_field if named else "prompt"
    return make_template(replace(options, prompt_field=prompt, response_field=response))


# ---------------------------------------------------------------------- as text


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The records of a file to learn from, read once, and the records that are left out.

    `sha256` is of the whole file; `stream`: it was a pipe or standard input.
    """

    name: str
    sha256: str
    stream: bool
    records: tuple[Record, ...]
    rejects: tuple[Reject, ...]


def read_file(
    path: str | Path | Sequence[Mapping[str, Any]],
    template: Template,
    *,
    limit: int | None = None,
    skip_bad: bool = False,
) -> RecordFile:
    """The records of a JSONL or CSV file, a pipe or standard input (``-``), or of a list, as text.

    `limit`: only the first `limit` lines. `skip_bad`: leave out records that cannot be used, instead of refusing the
    file.

    Raises DataError if records cannot be used and `skip_bad` is false (all are counted, the first ones named), or none
    is left.
    """
    rejects, records = list[Reject](), list[Record]()
    if isinstance(path, str | Path):
        opened = Input.open(path)
        name, digest, stream, rows = opened.name, opened.sha256, is_stream(path), read_rows(opened)
    else:
        digest = hashlib.sha256(b"".join(map(json_line, path))).hexdigest()
        name, stream, rows = "records", False, enumerate(map(row_of, path), 1)
    rows = rows if template.shape is None else shaped(rows, template.shape)
    for record in usable(read_records(islice(rows, limit), template), rejects):
        if record.is_blank:
            rejects.append(Reject(record.line, "empty prompt: every field of it is blank"))
        elif len(record.references) == 1:
            records.append(record)
        else:
            few = "empty response: there is nothing to learn"
            rejects.append(Reject(record.line, "several responses: give one, as text" if record.references else few))
    _check_left(name, records, rejects, skip_bad)
    return RecordFile(name, digest, stream, tuple(records), tuple(rejects))


def _check_left(name: str, found: Sequence[object], rejects: list[Reject], skip_bad: bool) -> None:
    """Sort the rejects, and raise DataError where they are refused or nothing else is left."""
    rejects.sort()
    refuse_rejects(name, rejects, skip_bad=skip_bad)
    if not found:
        raise DataError(f"{name}: no usable record" + (f": {reject_summary(rejects)}" if rejects else ""))


def read_sources(
    sources: Mapping[str, Source], template: Template, limits: Mapping[str, int | None], *, skip_bad: bool
) -> dict[str, RecordFile]:
    """The records of each source, which is read once; `limits` has the most records of a source. Needs no model."""

    check_streams(str(source) for source in sources.values() if isinstance(source, str | Path))
    return {
        name: read_file(source, template, limit=limits.get(name), skip_bad=skip_bad) for name, source in sources.items()
    }


def held_out(file: RecordFile) -> tuple[RecordFile, RecordFile]:
    """Split a file: every tenth record selects the best weights (second value), the others are learned."""
    lines = {line: number for number, line in enumerate(dict.fromkeys(one.line for one in file.records))}
    rest = tuple(one for one in file.records if lines[one.line] % _HELD_OUT)  # a line may be a chat of several answers
    dev = tuple(one for one in file.records if not lines[one.line] % _HELD_OUT)
    if not rest:
        raise DataError(f"{file.name}: one record is too few: a part is held out to select the best weights")
    note(f"{file.name}: {len(dev)} of {len(file.records)} records are held out to select the best weights")
    return replace(file, records=rest), replace(file, records=dev, rejects=())


# ---------------------------------------------------------------------- as token ids


@dataclass(frozen=True, slots=True)
class Example:
    """One record as token ids; `response` ends with the end token."""

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def decide_chat(template: Template, loaded: LoadedModel) -> None:
    """Have the template use chats if the model has a chat template, where the user has not said."""

    if template.chat is None:
        template.chat = chat_fault(loaded.tokenizer) is None


def written_turns(
    name: str, records: Sequence[Record], template: Template, tokenizer: Any
) -> tuple[tuple[Record, ...], list[Reject]]:
    """The records with calls of tools and reasoning in the text of their responses, as the chat template has them.

    What it does not write is left out, and so are responses that have nothing else; a note names both, and `name`, the
    source of the records. Records whose response the template refuses are rejects.
    """
    written, rejects, unwritten, silent = list[Record](), list[Reject](), set[str](), 0
    for record in records:
        turn = record.for_chat.get("turn")
        if turn is not None:
            extra, text = {n: v for n, v in record.for_chat.items() if n != "turn"}, record.references[0]
            try:
                whole = turn_text(tokenizer, text, turn, extra.get("tools", ())) if template.chat else text
            except DataError as e:
                rejects.append(Reject(record.line, str(e)))
                continue
            unwritten |= set(turn) if whole == text else set()
            record = replace(record, references=(whole,) if whole else (), for_chat=extra)
        if record.references:
            written.append(record)
        else:
            silent += 1
    if unwritten:
        more = f"; {silent} answers have nothing else and are left out" if silent else ""
        note(f"{name}: left out of responses, as no chat template writes them: {', '.join(sorted(unwritten))}{more}")
    return tuple(written), rejects


def encode_source(
    file: RecordFile, name: str, template: Template, loaded: LoadedModel, options: RecordOptions
) -> tuple[list[Example], int]:
    """Encode the records within the model's context; also the number of skipped records, which a note names."""

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


def encode_examples(
    file: RecordFile,
    template: Template,
    tokenizer: Any,
    *,
    max_length: int | None = None,
    vocabulary: int | None = None,
    skip_bad: bool = False,
) -> tuple[list[Example], list[Reject]]:
    """The records of a file as token ids, and all records that are left out.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Must have an end token.
    max_length : int, optional
        Most tokens of prompt and response together, such as the model's context. The template's field is cut if that
        is enough; other longer records are rejected.
    vocabulary : int, optional
        As for `PromptEncoder`; for responses too.
    skip_bad : bool
        As in `read_file`, whose errors this raises too.
    """
    check_end_token(tokenizer)
    encoder = PromptEncoder(tokenizer, None, template=template, vocabulary=vocabulary)
    examples: list[Example] = []
    records, rejects = written_turns(file.name, file.records, template, tokenizer)
    rejects += file.rejects
    for at in range(0, len(records), _TOKENIZE_AT_ONCE):
        chunk = records[at : at + _TOKENIZE_AT_ONCE]
        responses = response_ids([record.references[0] for record in chunk], tokenizer, chat=bool(template.chat))
        for prompt, response in zip(encoder.encode(chunk), responses, strict=True):
            try:
                if (fault := outside(response, tokenizer, vocabulary)) is not None:
                    raise DataError(f"the response has a {fault}")
                examples.append(_example(encoder, prompt, response, max_length))
            except DataError as e:
                rejects.append(Reject(prompt.record.line, str(e)))
    _check_left(file.name, examples, rejects, skip_bad)
    return examples, rejects


def _example(encoder: PromptEncoder, prompt: EncodedPrompt, response: list[int], max_length: int | None) -> Example:
    record = prompt.record
    if max_length is not None and 0 < max_length - len(response) < len(prompt.token_ids):
        (prompt,) = encoder.encode([record], max_length - len(response))
    if prompt.error is not None:
        raise DataError(prompt.error)
    example = Example(str(record.id), tuple(prompt.token_ids), tuple(response))
    if max_length is not None and len(example) > max_length:
        what = "response" if len(response) > max_length else "record"
        length = f"{len(prompt.token_ids)} + {len(response)} of {max_length} tokens"
        raise DataError(f"{what} longer than the context: {length}")
    return example
