"""Stop strings: text that ends a row, found while tokens come in and cut off at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipdecode.errors import UsageError

__all__ = ["StopStrings"]


class StopStrings:
    """Finds stop strings in the decoded text of a row; called with the row's new tokens, tells whether it is to end.

    Parameters
    ----------
    tokenizer : transformers tokenizer
    strings : sequence of str
        None empty.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if not all(strings):
            raise UsageError("--stop does not accept an empty text: leave it out")
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        # A token holds at least one byte, so a stop string that ends in the last token starts within these.
        self._tail = max((len(s.encode()) for s in strings), default=0) + 1

    def __call__(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens[-self._tail :], skip_special_tokens=True)
        return any(s in text for s in self._strings)

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        return text[: min((at for s in self._strings if (at := text.find(s)) >= 0), default=len(text))]
