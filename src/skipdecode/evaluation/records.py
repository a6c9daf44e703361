"""Records of a task: read, checked, merged. Text only; knows nothing about models.

A record that cannot be read, lacks a field or repeats an id stops the reading with its line number, or is left out on
request. A record without text to score (an empty prompt or no reference) is always left out. What is left out is
counted and named by line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import read_objects
from skipdecode.data.examples import Reject, reject_summary
from skipdecode.errors import DataError, MissingExtraError, UsageError
from skipdecode.evaluation.tasks import HubSource, Task

__all__ = ["Record", "Records", "load_records"]


@dataclass(frozen=True)
class Record:
    """One prompt with its references.

    Parameters
    ----------
    id : str
        The record's ``id``, or its line number.
    values : mapping
        The fields the prompt is made of, as text.
    references : tuple of str
        At least one, none empty.
    line : int
        1-based line in the file; 0 if it is from none. Where a record is from does not make it another.
    """

    id: str
    values: Mapping[str, str]
    references: tuple[str, ...]
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Records:
    """Records that can be scored, and what was left out.

    Parameters
    ----------
    items : tuple of Record
        In the order of the file.
    skipped : tuple of (int, str)
        Line number and reason of each record left out.
    """

    items: tuple[Record, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    def digest(self) -> str:
        """SHA-256 over ids, fields and references: two runs are comparable if it is the same."""
        text = json.dumps([[r.id, dict(r.values), r.references] for r in self.items], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def limited(self, count: int | None) -> Records:
        """The first `count` records."""
        return self if count is None else replace(self, items=self.items[:count])


def load_records(task: Task, data: str | Path | None = None, *, skip_bad: bool = False) -> Records:
    """Records of a task from a JSONL file, or from the task's hub dataset when `data` is None.

    Parameters
    ----------
    skip_bad : bool
        Leave out records that cannot be read, instead of refusing the file.

    Raises
    ------
    DataError
        A line that is not UTF-8 or not a JSON object, a missing or wrongly typed field, an id met twice (all unless
        `skip_bad`, all counted), a file that cannot be opened, or no record left to score.
    """
    rows: Iterable[tuple[int, dict[str, Any] | DataError]]
    if data is not None:
        source, rows = str(data), read_objects(Path(data))
    elif task.hub is not None:
        source, rows = task.hub.id, _hub(task.hub)
    else:
        raise UsageError(f"the task {task.name!r} has no dataset of its own: give a JSONL file with --data")
    items, skipped, wrong = _read(task, rows)
    if wrong and not skip_bad:
        summary = reject_summary([Reject(line, why) for line, why in wrong])
        raise DataError(f"{source}: {summary}; mend them, or skip them with --bad-records skip")
    skipped = sorted(skipped + wrong)
    if task.merge_same_prompt:
        items = _merged(task, items)
    if not items:
        why = f" ({len(skipped)} left out, the first at line {skipped[0][0]}: {skipped[0][1]})" if skipped else ""
        raise DataError(f"no record to score in {source}{why}")
    return Records(tuple(items), tuple(skipped))


def _hub(source: HubSource) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError(f"loading {source.id} from a hub (or give a file with --data)", "hub") from None
    try:
        rows = datasets.load_dataset(source.id, source.config, split=source.split, revision=source.revision)
    except (OSError, ValueError, RuntimeError) as e:
        reason = " ".join(str(e).split())[:200]
        raise DataError(f"the dataset {source.id} does not load ({reason}); give a JSONL file with --data") from None
    ours = {theirs: name for name, theirs in source.fields.items()}
    for number, row in enumerate(rows, 1):
        named = {ours.get(name, name): value for name, value in row.items()}
        for name, ending in source.strip.items():
            if isinstance(named.get(name), str):
                named[name] = named[name].rstrip().removesuffix(ending).rstrip()
        yield number, named


# ---------------------------------------------------------------------- checking


def _read(
    task: Task, rows: Iterable[tuple[int, dict[str, Any] | DataError]]
) -> tuple[list[Record], list[tuple[int, str]], list[tuple[int, str]]]:
    """Records; lines without a prompt or a reference, which are left out; lines that cannot be read."""
    items: list[Record] = []
    skipped: list[tuple[int, str]] = []
    wrong: list[tuple[int, str]] = []
    first_line: dict[str, int] = {}
    for line, row in rows:
        try:
            record = _record(task, line, row, first_line)
        except DataError as e:
            wrong.append((line, str(e)))
            continue
        if not any(value.strip() for value in record.values.values()):
            skipped.append((line, "empty prompt"))
        elif not record.references:
            skipped.append((line, "no reference text"))
        else:
            items.append(record)
    return items, skipped, wrong


def _record(task: Task, line: int, row: dict[str, Any] | DataError, first_line: dict[str, int]) -> Record:
    """The record of a line; raises DataError without the line's number. Its id joins those of `first_line`."""
    if isinstance(row, DataError):
        raise DataError(f"{row}; a line must hold one JSON object in UTF-8")
    identity = str(row.get("id", line))
    if identity in first_line:
        raise DataError(f"duplicate id: {identity!r} is the id of line {first_line[identity]} too")
    first_line[identity] = line
    values = {name: _text(row, name) for name in task.prompt_fields()}
    return Record(identity, values, _references(task, row), line)


def _text(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        raise DataError(f"the field {name!r} of the prompt is missing: the record has {_listed(row)}")
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"the field {name!r} must be text, not {type(value).__name__}")
    return str(value)


def _references(task: Task, row: Mapping[str, Any]) -> tuple[str, ...]:
    name = next((name for name in task.references if name in row), None)
    if name is None:
        raise DataError(f"no reference: one of {', '.join(task.references)} is needed, the record has {_listed(row)}")
    value = row[name]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"the field {name!r} must be text or a list of texts")
    return tuple(text.strip() for text in texts if text.strip())


def _listed(row: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, row))) or "no field"


def _merged(task: Task, items: list[Record]) -> list[Record]:
    """Records with the same prompt as one, with all their references, in order of first appearance."""
    groups: dict[str, Record] = {}
    for item in items:
        prompt = task.render(item.values)
        known = groups.get(prompt)
        groups[prompt] = replace(known, references=known.references + item.references) if known else item
    return list(groups.values())
