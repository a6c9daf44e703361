"""From JSONL records to token ids of prompt and response, through a template.

Prompt and response are tokenised apart, the prompt exactly as generation will see it; the response ends with the
tokenizer's end token. A record that cannot be used is a `Reject` with its line number, never a silent gap: the caller
refuses the file or skips the records and says how many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skipdecode.common.jsonl import read_objects
from skipdecode.data.template import Template
from skipdecode.errors import DataError

__all__ = ["Example", "Reject", "load_examples", "reject_summary"]

_TOKENIZE_AT_ONCE = 1000
_SHOWN = 5
_Row = tuple[int, str, dict[str, str], str]


@dataclass(frozen=True, slots=True)
class Example:
    """One record as token ids; `response` ends with the end token."""

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True, slots=True)
class Reject:
    """A record that cannot be used: its 1-based line and why."""

    line: int
    reason: str


def load_examples(
    path: Path,
    template: Template,
    tokenizer: Any,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    skip_bad: bool = False,
) -> tuple[list[Example], list[Reject]]:
    """Read and tokenise a file of records.

    Parameters
    ----------
    path : Path
        JSON lines.
    template : Template
        Makes prompt and response.
    tokenizer : PreTrainedTokenizerBase
        Must have an end token.
    max_length : int, optional
        Most tokens of prompt and response together, such as the model's context; where the template may cut a field
        of the prompt it does, else longer records are rejects.
    limit : int, optional
        Only the first `limit` lines.
    skip_bad : bool
        Leave rejects out and return them, instead of refusing the file.

    Returns
    -------
    list of Example, list of Reject

    Raises
    ------
    DataError
        If there are rejects and `skip_bad` is false (all are counted, the first ones named), or nothing is left.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end token: a tuned model could not learn where a response ends")
    examples: list[Example] = []
    rejects: list[Reject] = []
    rows = _rows(path, template, limit, rejects)
    while chunk := list(islice(rows, _TOKENIZE_AT_ONCE)):
        _tokenize(chunk, template, tokenizer, max_length, examples, rejects)
    rejects.sort(key=lambda reject: reject.line)
    if rejects and not skip_bad:
        raise DataError(f"{path}: {reject_summary(rejects)}; mend them, or skip them with --bad-records skip")
    if not examples:
        raise DataError(f"{path}: no usable record" + (f": {reject_summary(rejects)}" if rejects else ""))
    return examples, rejects


def reject_summary(rejects: Sequence[Reject]) -> str:
    """One line: how many records cannot be used, why, and where the first ones are."""
    kinds = Counter(reject.reason.split(":")[0] for reject in rejects)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    shown = "; ".join(f"line {r.line}: {r.reason}" for r in rejects[:_SHOWN])
    more = f"; and {len(rejects) - _SHOWN} more" if len(rejects) > _SHOWN else ""
    noun = "record" if len(rejects) == 1 else "records"
    return f"{len(rejects)} {noun} cannot be used ({counts}): {shown}{more}"


def _rows(path: Path, template: Template, limit: int | None, rejects: list[Reject]) -> Iterator[_Row]:
    """Line, id, prompt values and response text of the usable records; the others go to `rejects`."""
    first_line: dict[str, int] = {}
    for line, record in islice(read_objects(path), limit):
        if isinstance(record, DataError):
            rejects.append(Reject(line, str(record)))
            continue
        name = str(record.get("id", f"line-{line}"))
        if name in first_line:
            rejects.append(Reject(line, f"duplicate id: {name!r} is the id of line {first_line[name]} too"))
            continue
        first_line[name] = line
        try:
            values, response = template.values(record), template.response(record)
        except DataError as error:
            rejects.append(Reject(line, str(error)))
            continue
        yield line, name, values, response


def _tokenize(
    chunk: Sequence[_Row],
    template: Template,
    tokenizer: Any,
    max_length: int | None,
    examples: list[Example],
    rejects: list[Reject],
) -> None:
    prompts = template.prompt_tokens([values for _, _, values, _ in chunk], tokenizer)
    responses = tokenizer([response for *_, response in chunk], add_special_tokens=False)["input_ids"]
    for (line, name, values, _), prompt, response in zip(chunk, prompts, responses, strict=True):
        room = len(prompt) if max_length is None else max_length - len(response) - 1
        if 0 < room < len(prompt):
            (prompt,) = template.prompt_tokens([values], tokenizer, room=room)
        example = Example(name, tuple(prompt), (*response, tokenizer.eos_token_id))
        if not prompt:
            rejects.append(Reject(line, "empty prompt: the first response token needs one to follow"))
        elif max_length is not None and len(example) > max_length:
            what = "response" if len(example.response) > max_length else "record"
            rejects.append(
                Reject(
                    line, f"{what} longer than the context: {len(prompt)} + {len(response) + 1} of {max_length} tokens"
                )
            )
        else:
            examples.append(example)
