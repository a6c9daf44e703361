"""Stop strings: texts that end an output."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.errors import UsageError


class StopStrings(tuple[str, ...]):
    """Stop strings. The text ends before the first that is complete; of several that end together, before the longest.

    Raises UsageError: a stop string is empty or not text.
    """

    def __new__(cls, strings: Sequence[str] = ()) -> StopStrings:
        listed = isinstance(strings, Sequence)
        for text in strings if listed else [strings]:
            if not listed or not isinstance(text, str):
                raise UsageError(f"stop does not accept {text!r}: give a text or a list of texts")
            if not text:
                raise UsageError("stop does not accept an empty text: leave it out")
        return super().__new__(cls, strings)

    def cut(self, text: str) -> str:
        """The text up to the first stop string."""
        return text[: StopSearch(self).push(text)]


class StopSearch:
    """The search for stop strings in one text that comes in parts.

    Attribute `held`: the longest end of the text that may begin a stop string.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._length = 0
        self.held = ""

    def push(self, part: str) -> int | None:
        """Take the next part; the position in the whole text of the first stop string, None if there is none yet."""
        if not self._stops:  # as of most outputs
            return None
        start, text = self._length - len(self.held), self.held + part
        self._length += len(part)
        # The end and the beginning of the first match of each stop string; all begin in what was held or later.
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            return start + min(matches)[1]
        begun = max(overlap(text, stop) for stop in self._stops)
        self.held = text[len(text) - begun :]
        return None


def overlap(text: str, mark: str) -> int:
    """The number of characters at the end of a text with which a mark begins that may still become whole."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)
