"""Stop strings: text that ends an output, found while tokens come in and cut off at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipdecode.errors import UsageError

__all__ = ["StopStrings", "cut_at", "find_stop", "held_back"]


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of the stop strings begins; None if the text has none of them."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def cut_at(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string."""
    return text[: find_stop(text, stops)]


def held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that is the beginning of a stop string."""
    lengths = (
        size for stop in stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
    )
    return max(lengths, default=0)


class StopStrings:
    """Finds stop strings in the decoded text of a row; called with the row's new tokens, tells whether it is to end.

    Parameters
    ----------
    strings : sequence of str
        Texts that end a row, none of them empty; also an attribute.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        if not all(strings):
            raise UsageError("--stop does not accept an empty text: leave it out")
        self._tokenizer = tokenizer
        self.strings = tuple(strings)
        # A token holds at least one byte, so a stop string that ends in the last token starts within these.
        self._tail = max((len(s.encode()) for s in strings), default=0) + 1

    def __call__(self, tokens: Sequence[int]) -> bool:
        text = self._tokenizer.decode(tokens[-self._tail :], skip_special_tokens=True)
        return find_stop(text, self.strings) is not None

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        return cut_at(text, self.strings)
