"""From a record to the text of prompt and response, and to the prompt's tokens."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from skipdecode.errors import DataError, UsageError

__all__ = ["Template"]


class Template:
    """Makes prompt and response of a record.

    Parameters
    ----------
    prompt : str
        Text with record fields in braces, as in `"{mr}\\n"`; `{{` and `}}` stand for braces.
    response_fields : str or sequence of str
        Fields that may hold the response; the first one that a record has is used.
    chat : bool
        Put the prompt through the tokenizer's chat template as one user message.
    truncate : str, optional
        The field that loses its end where a prompt is longer than `max_prompt_tokens`.
    max_prompt_tokens : int, optional
        Longest prompt in tokens; goes with `truncate`.

    Raises
    ------
    UsageError
        If the prompt names no field or holds more than plain fields, or `truncate` is none of them.
    """

    def __init__(
        self,
        prompt: str,
        response_fields: str | Sequence[str],
        *,
        chat: bool = False,
        truncate: str | None = None,
        max_prompt_tokens: int | None = None,
    ) -> None:
        self._prompt = prompt
        self._responses = (response_fields,) if isinstance(response_fields, str) else tuple(response_fields)
        self._chat = chat
        self._fields = _template_fields(prompt)
        self._truncate = truncate
        self._most = max_prompt_tokens
        if (truncate is None) != (max_prompt_tokens is None) or (truncate and truncate not in self._fields):
            raise UsageError(
                f"prompt template: {truncate!r} cannot be cut: name one of its fields and a length in tokens"
            )

    def values(self, record: Mapping[str, Any]) -> dict[str, str]:
        """What stands in the braces.

        Raises
        ------
        DataError
            If a field is missing or is no text.
        """
        return {name: _text(record, name) for name in self._fields}

    def response(self, record: Mapping[str, Any]) -> str:
        """The response's text.

        Raises
        ------
        DataError
            If the field is missing, is no text or is empty.
        """
        name = next((name for name in self._responses if name in record), self._responses[0])
        response = _text(record, name).strip()
        if not response:
            raise DataError(f"empty response: field {name!r} has no text")
        return response

    def prompt_tokens(
        self, values: Sequence[Mapping[str, str]], tokenizer: Any, *, room: int | None = None
    ) -> list[list[int]]:
        """Token ids of the prompts with these values, exactly as generation will see them.

        A prompt longer than `max_prompt_tokens` or `room` loses the end of its truncated field; it stays as it is where
        no field may be cut, or the rest alone is too long.
        """
        found = self._encode(values, tokenizer)
        if self._truncate is None:
            return found
        most = min(n for n in (self._most, room) if n is not None)
        return [
            self._cut(value, self._truncate, ids, tokenizer, most) if len(ids) > most else ids
            for value, ids in zip(values, found, strict=True)
        ]

    def _encode(self, values: Sequence[Mapping[str, str]], tokenizer: Any) -> list[list[int]]:
        texts = [self._prompt.format_map(value) for value in values]
        if self._chat:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
        # A chat template writes its own special tokens.
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=not self._chat)["input_ids"]
        return ids

    def _cut(self, values: Mapping[str, str], field: str, ids: list[int], tokenizer: Any, most: int) -> list[int]:
        """The prompt with the end of `field` gone; as it is where the rest alone is too long."""
        text = values[field]
        ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        keep, shorter = len(ends), ids
        while len(shorter) > most:
            # Tokens merge over the cut, so one round may not be enough.
            keep -= len(shorter) - most
            if keep < 1:
                return ids
            (shorter,) = self._encode([{**values, field: text[: ends[keep - 1][1]]}], tokenizer)
        return shorter


def _text(record: Mapping[str, Any], name: str) -> str:
    if name not in record:
        present = ", ".join(map(repr, record)) or "none"
        raise DataError(f"missing field: {name!r}; the record has {present}")
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"field is no text: {name!r} is a {type(value).__name__}")
    text = str(value)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise DataError(f"field is no text: {name!r} has half of a surrogate pair")
    return text


def _template_fields(prompt: str) -> tuple[str, ...]:
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise UsageError(f"prompt template: {error}; write {{{{ and }}}} for braces") from None
    fields = tuple(name for _, name, _, _ in parts if name is not None)
    if not fields:
        raise UsageError("prompt template: it names no field of the record; write one in braces, as in '{text}'")
    for _, name, spec, conversion in parts:
        if name is not None and (spec or conversion or not name or set(name) & set(".[]")):
            raise UsageError(f"prompt template: {{{name}}} is not accepted: only plain field names stand in braces")
    return tuple(dict.fromkeys(fields))
