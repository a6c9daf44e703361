"""Sources of records: an input to generate from, files to learn from, a file or a dataset to evaluate on."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from skipdecode.common.files import is_stream
from skipdecode.common.jsonl import Fields, Json, Row, decoded, json_line, row_of
from skipdecode.common.progress import note
from skipdecode.common.rows import Input, format_of, read_rows
from skipdecode.common.spread import spread_over
from skipdecode.common.table_files import load_split
from skipdecode.data.records import (
    ReadRow,
    Record,
    Reject,
    read_records,
    refuse_rejects,
    reject_summary,
    usable,
)
from skipdecode.data.shapes import Shape
from skipdecode.data.tasks import HubSource, Task
from skipdecode.data.template import Prompt, PromptTemplate
from skipdecode.errors import DataError, UsageError

ARGUMENTS = "the arguments"
"""The name of the source of prompts that are arguments."""
_PLAIN = PromptTemplate()
_HELD_OUT = 10
Source = str | Path | Sequence[Fields]
"""A file of records (JSONL, CSV), or a list of records."""


def prompt_lines(prompts: Iterable[Prompt]) -> bytes:
    """Write prompts as lines of JSON. Raises DataError: one is no prompt."""
    lines = list[bytes]()
    for index, prompt in enumerate(prompts):
        row = _PLAIN.row(prompt)
        if isinstance(row, DataError):
            raise DataError(str(row), index=index)
        lines.append(json_line(row))
    return b"".join(lines)


class PromptSource:
    """The prompts of one input, which can be read repeatedly in constant memory.

    `opened`: closed by `close`. `format`: how it is read. `field`: of a line of text, as a record.
    """

    def __init__(self, opened: Input, format: str, field: str = "prompt") -> None:
        self.name = opened.name
        self.format = format
        self._input = opened
        self._field = field
        self._input.check()

    @property
    def fingerprint(self) -> Json:
        """JSON-ready; equal only for equal input, so that a run is resumed on the same input only."""
        return {"sha256": self._input.sha256, "format": self.format}

    @classmethod
    def open(cls, path: str, format: str | None = None, field: str = "prompt") -> Self:
        """A file, a pipe, or standard input (``-``).

        The default `format` follows from the ending (.jsonl, .ndjson, .json, .csv, .tsv, .txt); with any other, and
        from standard input, what begins with ``{`` is JSONL, and anything else is text with one prompt per line.

        Raises DataError: the file cannot be read, or has a format that is not supported.
        """
        opened = Input.open(path)
        if format is None:
            is_json = Path(path).suffix.lower() != ".txt" and (opened.begins_with(b"{") or opened.is_whole(""))
            format = format_of(path) or ("jsonl" if is_json else "txt")
        return cls(opened, format, field)

    @classmethod
    def of_prompts(cls, prompts: Iterable[Prompt]) -> Self:
        """Prompts given as arguments: records 1, 2, … with the field `prompt`, or with their own.

        Raises DataError: one is no prompt.
        """
        return cls(Input(ARGUMENTS, io.BytesIO(prompt_lines(prompts))), "jsonl")

    def records(self, read: ReadRow = _PLAIN.with_prompt) -> Iterator[Record]:
        """All records, from the first on, as `read` completes them."""
        return read_records(self._rows(), read)

    def count(self, read: ReadRow = _PLAIN.with_prompt, *, all_usable: bool = False) -> tuple[int, Record]:
        """Count the records, including those with an error; returns the number and the first that can be used.

        Records are read only up to that one, and counted behind it.
        Raises DataError: there is none, none can be used, or one cannot be used and `all_usable` is set, which reads
        all.
        """
        count, first, wrong = 0, None, ""
        row, line = ("prompt", "prompt") if self.name == ARGUMENTS else ("row", "line")
        rows = self._rows()
        for record in read_records(rows, read):
            count += 1
            if record.error is None:
                first = first or record
                if not all_usable:
                    break
            elif all_usable:
                raise DataError(f"{record.error} (in {self.name})", record.line)
            else:
                wrong = wrong or f"{line} {record.line}: {record.error}"
        count += sum(1 for _ in rows)
        if not count:
            raise self._empty()
        if first is None:
            raise DataError(f"nothing to generate: no {row} of {self.name} can be used; {wrong}")
        return count, first

    def filled(self) -> Self:
        """Return the source; raises DataError if there is no record."""
        if next(self.records(), None) is None:
            raise self._empty()
        return self

    def _empty(self) -> DataError:
        what = {"jsonl": "record", "txt": "line that is not blank"}.get(self.format, "record behind its header")
        return DataError(f"no prompts in {self.name}: it has no {what}")

    def close(self) -> None:
        self._input.close()

    def _rows(self) -> Iterator[tuple[int, Row]]:
        return self._text_rows() if self.format == "txt" else self._input.rows(self.format)

    def _text_rows(self) -> Iterator[tuple[int, Row]]:
        for line, raw in self._input.lines():
            try:
                yield line, {self._field: decoded(raw)}
            except DataError as e:
                yield line, e


@dataclass(frozen=True)
class Records:
    """Records to learn from or to score, in the order of the file, and the records that are left out.

    `sha256` is of the whole file; `stream`: it was a pipe or standard input.
    """

    items: tuple[Record, ...]
    skipped: tuple[Reject, ...] = ()
    name: str = "records"
    sha256: str = ""
    stream: bool = False

    def spread(self, count: int | None) -> Records:
        """At most `count` of the records, from all over the file, as are the first ones of them; see `spread_over`."""
        if count is None:
            return self
        return replace(self, items=tuple(self.items[i] for i in spread_over(len(self.items), count)))

    def digest(self) -> str:
        """SHA-256 of ids, fields and references: two runs are comparable if it is the same."""
        text = json.dumps([[str(r.id), dict(r.values), r.references] for r in self.items], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def load_records(
    task: Task,
    data: str | Path | Iterable[Fields] | None = None,
    *,
    shape: Shape | None = None,
    skip_bad: bool = False,
    limit: int | None = None,
) -> Records:
    """Records of a task from a JSONL or CSV file, from mappings, or from the task's hub dataset if `data` is None.

    Records with an empty prompt or no reference are always left out, and named by line.

    `shape`: of the records, whose prompts then fill the only field of the task's prompt. `skip_bad`: leave out records
    that cannot be read, instead of refusing the file. `limit`: only the first records;
    errors after them are not reported.

    Raises DataError: a line that is not UTF-8 or not a JSON object, a missing or wrongly typed field, an id met twice
    (all unless `skip_bad`, all counted), a file that cannot be opened, or no record left to score.
    """
    source, rows = _named_rows(task, data)
    items: dict[str, Record] = {}
    skipped: list[Reject] = []
    wrong: list[Reject] = []
    end = None
    for record in usable(replace(task.template, shape=shape).examples(rows), wrong):
        if record.is_blank:
            skipped.append(Reject(record.line, "empty prompt"))
        elif not record.references:
            skipped.append(Reject(record.line, "no reference text"))
        elif (key := str(record.prompt if task.merge_same_prompt else record.index)) in items:
            items[key] = replace(items[key], references=items[key].references + record.references)
        elif end is None:
            items[key] = record
            end = record.line if len(items) == limit else None
        if end is not None and not task.merge_same_prompt:
            break
    skipped, wrong = ([r for r in rejects if end is None or r.line < end] for rejects in (skipped, wrong))
    refuse_rejects(source, wrong, skip_bad=skip_bad)
    skipped = sorted(skipped + wrong)
    if not items:
        why = f" ({len(skipped)} left out, the first at line {skipped[0].line}: {skipped[0].reason})" if skipped else ""
        raise DataError(f"no record to score in {source}{why}")
    return Records(tuple(items.values()), tuple(skipped), "data")


def _named_rows(task: Task, data: str | Path | Iterable[Fields] | None) -> tuple[str, Iterator[tuple[int, Row]]]:
    if isinstance(data, str | Path):
        return str(data), read_rows(data)
    if data is not None:
        return "the records", enumerate(map(row_of, data), 1)
    if task.hub is not None:
        return task.hub.id, _hub_rows(task.hub)
    raise UsageError(f"the task {task.name!r} has no dataset of its own: give a JSONL file of records")


def _hub_rows(source: HubSource) -> Iterator[tuple[int, Row]]:
    rows = load_split(source.id, source.split, source.config, source.revision)
    names = {column: name for name, column in source.fields.items()}
    for number, row in enumerate(rows, 1):
        named = {names.get(column, column): value for column, value in row.items()}
        for name, ending in source.strip.items():
            if isinstance(named.get(name), str):
                named[name] = named[name].rstrip().removesuffix(ending).rstrip()
        yield number, named


def read_file(path: str | Path | Sequence[Fields], template: PromptTemplate, *, skip_bad: bool = False) -> Records:
    """The records of a JSONL or CSV file, a pipe or standard input (``-``), or of a list, as text.

    `skip_bad`: leave out records that cannot be used, instead of refusing the file.

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
    for record in usable(template.examples(rows), rejects):
        if record.is_blank:
            rejects.append(Reject(record.line, "empty prompt: every field of it is blank"))
        elif len(record.references) == 1:
            records.append(record)
        else:
            empty = "empty response: there is nothing to learn"
            reason = "several responses: give one, as text" if record.references else empty
            rejects.append(Reject(record.line, reason))
    check_usable(name, records, rejects, skip_bad=skip_bad)
    return Records(tuple(records), tuple(rejects), name, digest, stream)


def check_usable(name: str, records: Sequence[object], rejects: list[Reject], *, skip_bad: bool) -> None:
    """Sort the rejects, and raise DataError where they are refused or nothing else is left."""
    rejects.sort()
    refuse_rejects(name, rejects, skip_bad=skip_bad)
    if not records:
        raise DataError(f"{name}: no usable record" + (f": {reject_summary(rejects)}" if rejects else ""))


def held_out(file: Records) -> tuple[Records, Records]:
    """Split a file: every tenth record selects the best weights (second value), the others are learned."""
    lines = {line: number for number, line in enumerate(dict.fromkeys(record.line for record in file.items))}
    # A line may be a chat of several answers.
    rest = tuple(record for record in file.items if lines[record.line] % _HELD_OUT)
    dev = tuple(record for record in file.items if not lines[record.line] % _HELD_OUT)
    if not rest:
        raise DataError(f"{file.name}: one record is too few: a part is held out to select the best weights")
    note(f"{file.name}: {len(dev)} of {len(file.items)} records are held out to select the best weights")
    return replace(file, items=rest), replace(file, items=dev, skipped=())
