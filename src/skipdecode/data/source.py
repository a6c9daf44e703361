"""Sources of records: an input to generate from, a file or a dataset to evaluate on."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from skipdecode.common.jsonl import Row, decoded, row_of
from skipdecode.common.rows import Input, format_of, load_split, read_rows
from skipdecode.data.forms import Prompt, PromptForm
from skipdecode.data.records import Record, Reject, read_records, refuse_rejects, usable
from skipdecode.data.shapes import Shape, shaped
from skipdecode.data.tasks import HubSource, Task
from skipdecode.errors import DataError, UsageError

ARGUMENTS = "the arguments"
"""The name of the source of prompts that are arguments."""


class PromptSource:
    """The prompts of one input, which can be read repeatedly in constant memory.

    Parameters
    ----------
    opened : Input
        Closed by `close`.
    format : {"jsonl", "csv", "tsv", "txt"}
        How it is read.
    """

    def __init__(self, opened: Input, format: str) -> None:
        self.name = opened.name
        self.format = format
        self._input = opened
        self._row = "row"
        self._input.check()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """JSON-ready; equal only for equal input, so that a run is resumed on the same input only."""
        return {"sha256": self._input.sha256, "format": self.format}

    @classmethod
    def open(cls, path: str, format: str | None = None) -> Self:
        """A file, a pipe, or standard input (``-``).

        The default `format` follows from the ending (.jsonl, .ndjson, .json, .csv, .tsv, .txt); with any other, and
        from standard input, what begins with ``{`` is JSONL, and anything else is text with one prompt per line.

        Raises DataError: the file cannot be read, or has a format that is not supported.
        """
        opened = Input.open(path)
        if format is None:
            is_json = Path(path).suffix.lower() != ".txt" and (opened.begins_with(b"{") or opened.is_whole(""))
            format = format_of(path) or ("jsonl" if is_json else "txt")
        return cls(opened, format)

    @classmethod
    def of_prompts(cls, prompts: Iterable[Prompt]) -> Self:
        """Prompts given as arguments: records 1, 2, … with the field `prompt`, or with their own."""
        data = "".join(json.dumps(PromptForm().row(p)) + "\n" for p in prompts).encode()
        source = cls(Input(ARGUMENTS, io.BytesIO(data)), "jsonl")
        source._row = "prompt"
        return source

    def records(self, form: PromptForm | None = None) -> Iterator[Record]:
        """All records, from the first on; `form` selects their prompts."""
        return read_records(self._rows(form or PromptForm()), form or PromptForm())

    def count(self, form: PromptForm | None = None, *, all_usable: bool = False) -> int:
        """The number of records, including those with an error. Parses records only up to the first usable one.

        Raises DataError: there is none, none can be used, or one cannot be used and `all_usable` is set, which parses
        all.
        """
        found, wrong = False, ""
        for record in self.records(form):
            if record.error is not None and all_usable:
                raise DataError(f"{record.error} (in {self.name})", record.line)
            found = found or record.error is None
            wrong = wrong or f"{self._row.replace('row', 'line')} {record.line}: {record.error}"
            if found and not all_usable:
                break
        # Lines of JSON are counted without parsing.
        in_lines = self.format == "jsonl" and not self._input.is_whole(self.format)
        rows = sum(1 for _ in (self._input.lines() if in_lines else self._rows(form or PromptForm())))
        if not rows:
            raise self._empty()
        if not found:
            raise DataError(f"nothing to generate: no {self._row} of {self.name} can be used; {wrong}")
        return rows

    def check_filled(self) -> None:
        """Raise DataError if there is no record."""
        if next(self.records(), None) is None:
            raise self._empty()

    def _empty(self) -> DataError:
        what = {"jsonl": "record", "txt": "line that is not blank"}.get(self.format, "record behind its header")
        return DataError(f"no prompts in {self.name}: it has no {what}")

    def close(self) -> None:
        """Close the input."""
        self._input.close()

    def _rows(self, form: PromptForm) -> Iterator[tuple[int, Row]]:
        if self.format == "txt":
            return ((line, _text_row(raw, form)) for line, raw in self._input.lines())
        return self._input.rows(self.format)


def _text_row(raw: bytes | None, form: PromptForm) -> Row:
    try:
        return form.row(decoded(raw))
    except DataError as e:
        return e


# ---------------------------------------------------------------------- records to score


@dataclass(frozen=True)
class Records:
    """Records that can be scored, in the order of the file, and the records that are left out."""

    items: tuple[Record, ...]
    skipped: tuple[Reject, ...] = ()

    def digest(self) -> str:
        """SHA-256 of ids, fields and references: two runs are comparable if it is the same."""
        text = json.dumps([[str(r.id), dict(r.values), r.references] for r in self.items], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def load_records(
    task: Task,
    data: str | Path | Iterable[Mapping[str, Any]] | None = None,
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
    template = task.template()
    template.shape = shape
    if shape is not None:
        rows = shaped(rows, shape)
    items: dict[str, Record] = {}
    skipped: list[Reject] = []
    wrong: list[Reject] = []
    end = None
    for record in usable(read_records(rows, template), wrong):
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
    skipped, wrong = ([r for r in each if end is None or r.line < end] for each in (skipped, wrong))
    refuse_rejects(source, wrong, skip_bad=skip_bad)
    skipped = sorted(skipped + wrong)
    if not items:
        why = f" ({len(skipped)} left out, the first at line {skipped[0].line}: {skipped[0].reason})" if skipped else ""
        raise DataError(f"no record to score in {source}{why}")
    return Records(tuple(items.values()), tuple(skipped))


def _named_rows(
    task: Task, data: str | Path | Iterable[Mapping[str, Any]] | None
) -> tuple[str, Iterator[tuple[int, Row]]]:
    if isinstance(data, str | Path):
        return str(data), read_rows(data)
    if data is not None:
        return "the records", enumerate(map(row_of, data), 1)
    if task.hub is not None:
        return task.hub.id, _hub_rows(task.hub)
    raise UsageError(f"the task {task.name!r} has no dataset of its own: give a JSONL file of records")


def _hub_rows(source: HubSource) -> Iterator[tuple[int, Row]]:
    rows = load_split(source.id, source.split, source.config, source.revision)
    ours = {theirs: name for name, theirs in source.fields.items()}
    for number, row in enumerate(rows, 1):
        named = {ours.get(name, name): value for name, value in row.items()}
        for name, ending in source.strip.items():
            if isinstance(named.get(name), str):
                named[name] = named[name].rstrip().removesuffix(ending).rstrip()
        yield number, named
