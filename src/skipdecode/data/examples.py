"""Templates by options and records, and records to learn from as token ids.

Every record that cannot be used is reported with its line; the caller refuses the file or leaves the record out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from skipdecode.common.files import is_stream
from skipdecode.common.jsonl import kind_of
from skipdecode.common.options import Options, Reads, option, setting
from skipdecode.common.progress import note
from skipdecode.common.rows import read_rows
from skipdecode.common.types import Tokenizer
from skipdecode.data.chats import response_ids, turn_text
from skipdecode.data.messages import chat_fields
from skipdecode.data.prompts import (
    EncodedPrompt,
    PromptEncoder,
    check_end_token,
    context_length,
    outside,
    vocabulary_size,
)
from skipdecode.data.records import Record, Reject, reject_summary
from skipdecode.data.shapes import TEXT, Shape, fitting_shapes, no_shape, shape_of_field
from skipdecode.data.source import Records, Source, check_usable
from skipdecode.data.tasks import load_task, task_file
from skipdecode.data.template import PromptTemplate
from skipdecode.errors import DataError, UsageError

_REMEDY = "give a `task`, or `prompt_field` (or `prompt_template`) with `response_field`"
_ANSWERS = "`self` learns the model's own answers to `prompts`"
_TOKENIZE_AT_ONCE = 1000
_ROWS_SEARCHED = 1000  # of which one has to have a known shape


def with_breaks(text: str) -> str:
    r"""`text` with \n and \t read as line end and tab."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def bad_records_option(default: str) -> Any:
    return option(
        "records that cannot be used: refuse the file, or skip the records and print their lines; generate writes the "
        "error in their place",
        default=default,
        choices=("refuse", "skip"),
    )


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options):
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
    prompt_field: str | None = option(
        "field with the prompt, which goes into the model's chat template, if there is one (default: those of the "
        "template, else by the shape of the records)",
        default=None,
        alias="field",
    )
    chat: bool = option(
        "apply the model's chat template, with the prompt as user message; lists of messages always get it",
        default=False,
    )
    bad_records: str = bad_records_option("refuse")

    @property
    def skips_bad(self) -> bool:
        """Whether records that cannot be used are left out."""
        return self.bad_records == "skip"


@dataclass(frozen=True, kw_only=True)
class RecordOptions(PromptOptions):
    """The prompt and the response of a record."""

    EXCLUDES: ClassVar = {"task": ("response_field", "chat")}

    response_field: str | None = option("field with the response", default=None)
    max_length: int | None = setting(
        "most tokens of prompt and response together (default: the model's context)", default=None, least=1
    )


def choose_template(
    options: PromptOptions, tuned: PromptTemplate | None, *, plain: bool = False, system: str | None = None
) -> PromptTemplate:
    """The template of prompts to generate from, as the options say; else `tuned`, that of the checkpoint; else a chat.

    `plain`: prompts stay as they are; lists of messages are chats all the same. A `tuned` template that is not for
    chats is not used where the user wants chats. `system`: the system message of every chat.

    Raises UsageError: more than one of a text, a task and `plain`; a template or task that is not accepted.
    """
    if sum((options.prompt_template is not None, options.task is not None, plain)) > 1:
        raise UsageError("prompt_template, task and no template each say what a prompt is: give one of them")
    chat = options.chat or system is not None
    if options.prompt_template is not None:
        chosen = PromptTemplate(options.prompt_template)
    elif options.task is not None:
        chosen = load_task(options.task).template
    elif tuned is not None and not plain and (tuned.chat or not chat):
        chosen = tuned
    else:
        chosen = PromptTemplate(chat=None if tuned is None and not plain else False)
    shape = None if options.prompt_field is None else shape_of_field(options.prompt_field)
    return replace(chosen, chat=chat or chosen.chat, shape=shape, system=system)


def make_template(options: RecordOptions, source: Source | None = None) -> PromptTemplate:
    """The template of the options, else of the shape that the first record of the source has.

    Raises UsageError if the options have more than one, and DataError if the source has no known shape.
    """
    named = [n for n in ("task", "prompt_template", "prompt_field") if getattr(options, n) is not None]
    read_once = isinstance(source, str | Path) and is_stream(source)
    if not named and source is not None and not read_once and options.response_field is None:
        shape = known_shape(source, _REMEDY, _ANSWERS)
        chat = options.chat or (False if shape is TEXT else None)
        return PromptTemplate("{prompt}", ("response",), chat, shape=shape)
    if len(named) != 1:
        why = f"{source} is read once, so its shape is not found out: " if read_once and not named else ""
        raise UsageError(f"{why}give one of `task`, `prompt_template` and `prompt_field`")
    if options.task is not None:
        return load_task(options.task).template
    if options.response_field is None:
        raise UsageError("`response_field` is missing: give the field of the record that is the response")
    by_default = False if options.prompt_field is None else None
    text = options.prompt_template or f"{{{options.prompt_field}}}"
    return PromptTemplate(text, (options.response_field,), options.chat or by_default)


def known_shape(source: Any, remedy: str, answers: str, template: PromptTemplate | None = None) -> Shape | None:
    """The shape of the records of a source, which a note names; None if they are written for the template.

    Records that can be read only once are taken as written for it. In errors, `remedy` says how fields are named, and
    `answers` what to do with prompts alone.

    Raises DataError: there is no record, or none has prompt and response of one shape.
    """
    where, rows = "the records", source
    is_file = isinstance(source, str | Path)
    if template is not None and (is_stream(source) if is_file else not isinstance(source, Sequence)):
        return None
    if is_file:
        where, rows = str(source), (row for _, row in read_rows(source))
    elif not isinstance(source, Sequence):
        raise UsageError("records are read several times, so they cannot be an iterator: give a list or a file")
    errors = []
    for row in islice(rows, _ROWS_SEARCHED):
        if not isinstance(row, Mapping):
            reason = row if isinstance(row, DataError) else f"not a mapping: {kind_of(row)}"
            errors.append(f"no record can be read: {reason}")
        elif template is not None and template.fits(row):
            return None
        elif len(fitting := fitting_shapes(row)) == 1:
            # An encoder says where system messages and tools are not used.
            unused = fitting[0].unused(row, (*chat_fields(row, chat=False), *fitting[0].responses))
            note(f"{where}: records of {fitting[0].name}" + (f"; left out: {', '.join(unused)}" if unused else ""))
            return fitting[0]
        else:
            errors.append(f"its records {no_shape(row, answers)}; {remedy}")
    raise DataError(f"{where}: {(*errors, 'no record can be read: there is none')[0]}")


def self_template(options: RecordOptions) -> PromptTemplate | None:
    """The template of prompts without responses; None if the options have none."""
    named = options.task or options.prompt_template or options.prompt_field
    if not named and not options.chat:
        return None
    response, prompt = None if options.task else "response", options.prompt_field if named else "prompt"
    return make_template(replace(options, prompt_field=prompt, response_field=response))


@dataclass(frozen=True, slots=True)
class Example:
    """One record as token ids; `response` ends with the end token."""

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def written_turns(records: Records, template: PromptTemplate, tokenizer: Tokenizer) -> Records:
    """The records with calls of tools and reasoning in the text of their responses, as the chat template has them.

    What it does not write is left out, and so are responses that have nothing else; a note names both. Records whose
    response the template refuses are skipped.
    """
    written, rejects, unwritten, silent = list[Record](), list[Reject](), set[str](), 0
    for record in records.items:
        turn = record.for_chat.get("turn")
        if turn is not None:
            extra, text = {n: v for n, v in record.for_chat.items() if n != "turn"}, record.references[0]
            try:
                rendered = turn_text(tokenizer, text, turn, extra.get("tools", ())) if template.chat else text
            except DataError as e:
                rejects.append(Reject(record.line, str(e)))
                continue
            unwritten |= set(turn) if rendered == text else set()
            record = replace(record, references=(rendered,) if rendered else (), for_chat=extra)
        if record.references:
            written.append(record)
        else:
            silent += 1
    if unwritten:
        more = f"; {silent} answers have nothing else and are left out" if silent else ""
        names = ", ".join(sorted(unwritten))
        note(f"{records.name}: left out of responses, as no chat template writes them: {names}{more}")
    return replace(records, items=tuple(written), skipped=(*records.skipped, *rejects))


def encode_source(
    file: Records, name: str, template: PromptTemplate, loaded: Any, options: RecordOptions
) -> tuple[list[Example], int]:
    """Encode the records within a loaded model's context; also the number of skipped ones, which a note names."""
    limits = [most for most in (options.max_length, context_length(loaded.model.config)) if most is not None]
    examples, rejects = encode_examples(
        file,
        template.for_tokenizer(loaded.tokenizer),
        loaded.tokenizer,
        max_length=min(limits, default=None),
        vocabulary=vocabulary_size(loaded.model),
        skip_bad=options.skips_bad,
    )
    if rejects:
        note(f"{name}: {reject_summary(rejects)}")
    return examples, len(rejects)


def encode_examples(
    file: Records,
    template: PromptTemplate,
    tokenizer: Tokenizer,
    *,
    max_length: int | None = None,
    vocabulary: int | None = None,
    skip_bad: bool = False,
) -> tuple[list[Example], list[Reject]]:
    """The records of a file as token ids, and all records that are left out.

    `tokenizer`: must have an end token. `max_length`: most tokens of prompt and response together, such as the model's
    context. The template's field is cut if that is enough; other longer records are rejected. `vocabulary`: as for
    `PromptEncoder`; for responses too. `skip_bad`: as in `read_file`, whose errors this raises too.
    """
    check_end_token(tokenizer)
    encoder = PromptEncoder(tokenizer, None, template, vocabulary=vocabulary)
    examples: list[Example] = []
    file = written_turns(file, template, tokenizer)
    rejects = list(file.skipped)
    for at in range(0, len(file.items), _TOKENIZE_AT_ONCE):
        chunk = file.items[at : at + _TOKENIZE_AT_ONCE]
        responses = response_ids([record.references[0] for record in chunk], tokenizer, chat=bool(template.chat))
        for prompt, response in zip(encoder.encode(chunk), responses, strict=True):
            try:
                if (fault := outside(response, tokenizer, vocabulary)) is not None:
                    raise DataError(f"the response has a {fault}")
                examples.append(_example(encoder, prompt, response, max_length))
            except DataError as e:
                rejects.append(Reject(prompt.record.line, str(e)))
    check_usable(file.name, examples, rejects, skip_bad=skip_bad)
    return examples, rejects


def _example(encoder: PromptEncoder, prompt: EncodedPrompt, response: list[int], max_length: int | None) -> Example:
    record = prompt.record
    if max_length is not None and 0 < max_length - len(response) < len(prompt.token_ids):
        (prompt,) = encoder.encode([record], max_length - len(response))
    if prompt.error is not None:
        raise DataError(prompt.error)
    example = Example(str(record.id), tuple(prompt.token_ids), tuple(response))
    if max_length is not None and len(example) > max_length:
        part = "response" if len(response) > max_length else "record"
        length = f"{len(prompt.token_ids)} + {len(response)} of {max_length} tokens"
        raise DataError(f"{part} longer than the context: {length}")
    return example
