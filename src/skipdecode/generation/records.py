"""Output records for the records of a file: what `skipdecode generate` does, as a function, and how it writes them.

Records of a file OUT are appended to the journal ``OUT.partial`` first, in lines of ``index ok|bad<tab>JSON``. At the
end they are written in input order to a temporary file, which is renamed to OUT. Records come almost in order (batches
are sorted by length inside a window only), so sorting them, and knowing which are finished, needs memory for a window,
not for the file. A stream (standard output, a device, a pipe) gets each record as soon as all before it are written;
such a run cannot be resumed. A terminal gets text instead of JSON.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from skipdecode.common.files import is_stream, linked, open_stream, replaced
from skipdecode.common.journal import Journal
from skipdecode.common.jsonl import json_line
from skipdecode.common.options import Options, option, setting
from skipdecode.common.progress import note, progress_bar
from skipdecode.data.forms import PromptForm
from skipdecode.data.prompts import EncodedPrompt, PromptEncoder
from skipdecode.data.source import ARGUMENTS, PromptSource
from skipdecode.data.stopping import StopStrings
from skipdecode.engine.requests import BATCH, Sampling, SamplingOptions
from skipdecode.errors import WriteError
from skipdecode.models.families import vocabulary_size
from skipdecode.models.loading.base_weights import checkpoint_digest
from skipdecode.models.loading.ref import served_name
from skipdecode.schedule import Schedule

if TYPE_CHECKING:  # torch is imported with the model, so that the command line's --help stays quick
    from skipdecode.generation.llm import LLM
    from skipdecode.generation.run import Job
    from skipdecode.generation.stats import RunStats


RowForm = Callable[[dict[str, Any]], bytes]


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
    name: str | None = setting("name of the model in a batch's lines (default: the last part of MODEL)", default=None)
    include_prompt: bool = option("add the prompt to each output record", default=False)
    max_new_tokens: int = option("most new tokens of a record", default=128, least=1)
    batch_size: int = option("sequences decoded together", default=BATCH, least=1)
    compare: bool = option(
        "afterwards run up to 4 batches again, three times in turn with full depth, and print both speeds",
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
    run with other settings; KeyboardInterrupt, which says what is retained.
    """
    from skipdecode.engine.opening import end_tokens
    from skipdecode.generation.run import Job, refuse_bad_rows
    from skipdecode.generation.speed import Method

    rows = source.count(form, all_usable=options.on_error == "stop")
    if form.guessed is not None and source.name != ARGUMENTS:
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
    compared = Method(llm.backend, schedule, exact=exact), Method(llm.backend, exact=exact)
    job = Job(
        texts=llm.texts,
        sampling=llm.constrained(sampling, json_schema),
        max_new_tokens=options.max_new_tokens,
        ends=end_tokens(model, tokenizer),
        stop=StopStrings(stop),
        exact=exact,
        grammars=llm.grammars,
        encoder=encoder,
        make_engine=lambda rows: llm.backend.engine(schedule, max_rows=rows, prefix_cache=True),
        batch_size=options.batch_size,
        repeat=repeat,
        answers_of=options.name or served_name(llm.loaded.name) if options.output_format == "batch" else None,
        compared=compared if options.compare else None,
    )
    writer = open_writer(output, settings, form=shown[0] if shown else json_line)
    try:
        if options.on_error == "stop":
            refuse_bad_rows(source.records(form), job)
        return _run(source, form, job, writer, rows, quiet=shown is not None and sys.stdout.isatty()), settings
    except KeyboardInterrupt as stop:
        raise type(stop)(f": {writer.resume_hint}") from None
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


# ---------------------------------------------------------------------- writing


def open_writer(output: str, settings: dict[str, Any], *, form: RowForm = json_line) -> RowWriter:
    """The writer for a file name, or ``-`` for standard output.

    `settings` is the run's JSON-ready fingerprint. `form` formats a record for standard output; files hold JSON
    lines.

    Raises OutputError: it cannot be written, or holds records of an unfinished run with other settings.
    """
    if output == "-":
        return StreamWriter(sys.stdout.buffer, "standard output", form)
    if is_stream(output):
        return StreamWriter(open_stream(output), output)
    return FileWriter(Path(output), settings)


def named_text(row: dict[str, Any]) -> bytes:
    """A record for a terminal: one line of its prompt, its text, an empty line."""
    name = " ".join(row.get("prompt", f"line {row.get('line')}").split())
    width = shutil.get_terminal_size().columns - 2
    return b"> %s\n%s\n" % ((name if len(name) <= width else name[: width - 1] + "…").encode(), plain_text(row))


def plain_text(row: dict[str, Any]) -> bytes:
    """The text of a record, or its error."""
    text: str = row["text"] if "text" in row else f"[{row['error']}]"
    return (text.strip("\n") + "\n").encode()


class _Row(NamedTuple):
    number: int
    bad: bool
    line: bytes

    @classmethod
    def parse(cls, raw: bytes) -> _Row:
        """A row of the journal; ValueError if it is not whole."""
        head, _, line = raw.partition(b"\t")
        index, _, kind = head.partition(b" ")
        if kind not in (b"ok", b"bad") or not (line.startswith(b"{") and line.endswith(b"}\n")):
            raise ValueError("not a whole row")
        return cls(int(index), kind == b"bad", line)


class FileWriter:
    """Writes finished records, in any order, to a regular file; every index from 0 on must come once.

    Attributes `rows_before` and `bad_before`: records of an earlier run, and how many of them are errors.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.rows_before = 0
        self.bad_before = 0
        self._done = _InOrder()
        self._journal = Journal(
            partial_path(path), settings, parse=_Row.parse, take=self._take,
            pieces="finished rows", remedy=f"delete {partial_path(path)} to begin anew",
        )  # fmt: skip

    @property
    def resume_hint(self) -> str:
        """How to resume an interrupted run, in one line."""
        # Counted in the file: an interrupt may come between writing a record and counting it.
        finished = sum(1 for _ in self._journal.read())
        return f"{finished} finished rows are kept in {self._journal.path}; the same command goes on from there"

    def is_done(self, index: int) -> bool:
        """Whether an earlier run wrote this record."""
        return index in self._done

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        """Write one record; raises WriteError if that fails."""
        self._journal.append(b"%d %s\t" % (index, b"bad" if bad else b"ok") + json_line(row))

    def finish(self) -> None:
        """All records are written: put the output in place, replacing an existing file. Raises WriteError."""
        self._journal.sync()
        try:
            with replaced(self.path) as out:
                order = _InOrder()
                for row in self._journal.read():
                    out.writelines(order.push(row.number, row.line))
            self._journal.remove()
        except OSError as e:
            raise WriteError(f"cannot write {self.path}: {e.strerror or e}; {self.resume_hint}") from None

    def close(self) -> None:
        """Close the journal and keep it; does nothing after `finish`."""
        self._journal.close()

    def _take(self, row: _Row) -> None:
        self.rows_before += 1
        self.bad_before += row.bad
        for _ in self._done.push(row.number, b""):
            pass


class StreamWriter:
    """Writes records to a stream in input order, each as soon as all before it are written; as `FileWriter`."""

    rows_before = 0
    bad_before = 0

    def __init__(self, stream: IO[bytes], name: str, form: RowForm = json_line) -> None:
        self._stream = stream
        self._name = name
        self._form = form
        self._order = _InOrder()

    @property
    def resume_hint(self) -> str:
        return f"what went to {self._name} cannot be resumed: name an output file for a run that can"

    def is_done(self, index: int) -> bool:
        return False

    def put(self, index: int, row: dict[str, Any], *, bad: bool = False) -> None:
        self._write(self._order.push(index, self._form(row)))

    def finish(self) -> None:
        self.close()

    def close(self) -> None:
        """Write the records that waited for an earlier one, so that an interrupted run loses none."""
        if self._stream.closed:
            return
        self._write(self._order.rest())
        if self._stream is not sys.stdout.buffer:
            self._stream.close()

    def _write(self, lines: Iterator[bytes]) -> None:
        try:
            self._stream.writelines(lines)
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as e:
            # The interpreter must not try again to write the rest when it closes the stream.
            with contextlib.suppress(OSError):
                self._stream.close()
            raise WriteError(f"cannot write to {self._name}: {e.strerror or e}") from None


RowWriter = FileWriter | StreamWriter


class _InOrder:
    """Yields lines in the order of their index, and holds back lines that come early."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, bytes] = {}

    def __contains__(self, index: int) -> bool:
        return index < self._next or index in self._early

    def push(self, index: int, line: bytes) -> Iterator[bytes]:
        if index not in self:
            self._early[index] = line
        while self._next in self._early:
            yield self._early.pop(self._next)
            self._next += 1

    def rest(self) -> Iterator[bytes]:
        """The lines that are held back, in order, although lines before them are missing."""
        for index in sorted(self._early):
            yield self._early.pop(index)


def partial_path(output: Path | str) -> Path:
    """The journal of finished records, beside the file that `output` names."""
    path = linked(Path(output))
    return path.with_name(path.name + ".partial")


def output_files(output: str) -> list[Path]:
    """All files that are written for an output."""
    return [Path(output), partial_path(output)]
