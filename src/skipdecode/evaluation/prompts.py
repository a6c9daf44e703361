"""Prompts of records as token ids, cut to length at the field that may lose its end."""

from __future__ import annotations

from typing import Any

from skipdecode.errors import DataError
from skipdecode.evaluation.records import Record
from skipdecode.evaluation.tasks import Task

__all__ = ["encode_prompt", "reference_tokens"]


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
                f"record {record.id}: without {task.truncate!r} its prompt is longer than {most} tokens already"
            )
        raise DataError(
            f"record {record.id}: its prompt has {len(tokens)} tokens, there is room for {most}; shorten it, "
            "lower --max-new-tokens, or name a field to cut in the task file (truncate, max_prompt_tokens)"
        )
    if not tokens:
        raise DataError(f"record {record.id}: its prompt has no token")
    return tokens


def reference_tokens(record: Record, tokenizer: Any) -> int:
    """Length of a record's references in tokens: their mean, rounded, the end token included."""
    lengths = [len(ids) + 1 for ids in tokenizer(list(record.references), add_special_tokens=False)["input_ids"]]
    return round(sum(lengths) / len(lengths))
