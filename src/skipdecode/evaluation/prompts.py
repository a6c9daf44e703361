"""Prompts of records as token ids, cut to length at the field that may lose its end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skipdecode.data.examples import Reject, reject_summary
from skipdecode.errors import DataError
from skipdecode.evaluation.records import Record, Records
from skipdecode.evaluation.tasks import Task

__all__ = ["encode_prompt", "encode_prompts", "reference_ids", "reference_tokens"]


def encode_prompts(
    task: Task, records: Records, tokenizer: Any, *, room: int | None = None, skip_bad: bool = False
) -> tuple[Records, list[list[int]]]:
    """Token ids of the prompts of all records, and the records that have them.

    Parameters
    ----------
    room : int, optional
        Most tokens that the model's context leaves for a prompt.
    skip_bad : bool
        Leave out records whose prompt `encode_prompt` refuses, instead of refusing them all; the records that are
        returned name them.

    Raises
    ------
    DataError
        Prompts are refused and `skip_bad` is false (all are counted, the first ones named), or no record is left.
    """
    items, prompts, rejects = [], [], []
    for record in records.items:
        try:
            prompts.append(encode_prompt(task, record, tokenizer, room=room))
        except DataError as e:
            rejects.append(Reject(record.line, str(e)))
        else:
            items.append(record)
    if rejects and not (skip_bad and items):
        remedy = "shorten what is too long, lower --max-new-tokens" + (
            "" if task.truncate else ", name a field to cut in the task file (truncate, max_prompt_tokens)"
        )
        raise DataError(
            f"{reject_summary(rejects)}; {remedy}" + (", or leave them out with --bad-records skip" if items else "")
        )
    skipped = (*records.skipped, *((reject.line, reject.reason) for reject in rejects))
    return replace(records, items=tuple(items), skipped=skipped), prompts


def encode_prompt(task: Task, record: Record, tokenizer: Any, *, room: int | None = None) -> list[int]:
    """Token ids of a record's prompt, tokenised as for tuning.

    Parameters
    ----------
    room : int, optional
        Most tokens that the model's context leaves for the prompt.

    Raises
    ------
    DataError
        The prompt is longer than `room` and cannot be cut to it, or it has no token.
    """
    (tokens,) = task.template().prompt_tokens([record.values], tokenizer, room=room)
    most = min((n for n in (task.max_prompt_tokens, room) if n is not None), default=None)
    if most is not None and len(tokens) > most:
        if task.truncate is not None:
            raise DataError(
                f"prompt too long: that of record {record.id} has more than {most} tokens without {task.truncate!r} too"
            )
        raise DataError(
            f"prompt too long: that of record {record.id} has {len(tokens)} tokens, there is room for {most}"
        )
    if not tokens:
        raise DataError(f"empty prompt: that of record {record.id} has no token")
    return tokens


def reference_ids(record: Record, tokenizer: Any) -> list[list[int]]:
    """Token ids of a record's references as tuning sees responses: with the end token, if the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [[*ids, *end] for ids in tokenizer(list(record.references), add_special_tokens=False)["input_ids"]]


def reference_tokens(record: Record, tokenizer: Any) -> int:
    """Length of a record's references in tokens: their mean, rounded."""
    lengths = [len(ids) for ids in reference_ids(record, tokenizer)]
    return round(sum(lengths) / len(lengths))
