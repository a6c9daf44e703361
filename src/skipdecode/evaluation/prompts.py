"""Prompts of records as token ids, cut to length at the field that may lose its end."""

from __future__ import annotations

from collections.abc import Mapping
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
        The prompt is longer than `room` and the task does not say which field may be cut, or it has no token.
    """
    tokens = _tokens(task, record.values, tokenizer)
    most = min((n for n in (task.max_prompt_tokens, room) if n is not None), default=None)
    if most is not None and len(tokens) > most:
        if task.truncate is None:
            raise DataError(
                f"record {record.id}: its prompt has {len(tokens)} tokens, there is room for {most}; shorten it, "
                "lower --max-new-tokens, or name a field to cut in the task file (truncate, max_prompt_tokens)"
            )
        tokens = _cut(task, record, tokenizer, most)
    if not tokens:
        raise DataError(f"record {record.id}: its prompt has no token")
    return tokens


def reference_tokens(record: Record, tokenizer: Any) -> int:
    """Length of a record's references in tokens: their mean, rounded, the end token included."""
    lengths = [len(ids) + 1 for ids in tokenizer(list(record.references), add_special_tokens=False)["input_ids"]]
    return round(sum(lengths) / len(lengths))


def _cut(task: Task, record: Record, tokenizer: Any, most: int) -> list[int]:
    """The longest prompt of at most `most` tokens whose truncated field keeps its beginning."""
    field = str(task.truncate)
    text = record.values[field]
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    keep = len(ends)
    tokens = _tokens(task, record.values, tokenizer)
    while len(tokens) > most:
        # Tokens merge over the cut, so one round may not be enough.
        keep -= len(tokens) - most
        if keep < 1:
            raise DataError(f"record {record.id}: without {field!r} its prompt is longer than {most} tokens already")
        tokens = _tokens(task, {**record.values, field: text[: ends[keep - 1][1]]}, tokenizer)
    return tokens


def _tokens(task: Task, values: Mapping[str, str], tokenizer: Any) -> list[int]:
    text = task.render(values)
    if task.chat:
        message = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    # A chat template writes its own special tokens.
    return [int(token) for token in tokenizer(text, add_special_tokens=not task.chat)["input_ids"]]
