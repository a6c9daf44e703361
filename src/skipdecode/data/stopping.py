"""Stop strings: texts that end an output. The search reads each character once."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.errors import UsageError


class StopStrings:
    """The stop strings of a request, with their tables for the search; all sequences of the request share them.

    The text ends before the stop string that is complete first; of several that end at the same character, before the
    longest.

    Parameters
    ----------
    strings : sequence of str
        Not empty; also an attribute.

    Raises
    ------
    UsageError
        A stop string is empty or not text.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        listed = isinstance(strings, Sequence)
        for text in strings if listed else [strings]:
            if not listed or not isinstance(text, str):
                raise UsageError(f"stop does not accept {text!r}: give a text or a list of texts")
            if not text:
                raise UsageError("--stop does not accept an empty text: leave it out")
        self.strings = tuple(dict.fromkeys(strings))
        self.borders = tuple(_borders(text) for text in self.strings)
        self.starts = frozenset(text[0] for text in self.strings)

    def cut(self, text: str) -> str:
        """The text up to the first stop string."""
        return text[: StopSearch(self).push(text)]


class StopSearch:
    """The search for stop strings in one text that comes in parts (Knuth-Morris-Pratt, one state per stop string).

    Attributes
    ----------
    held : int
        Length of the longest suffix of the text that is a prefix of a stop string.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._matched = [0] * len(stops.strings)  # length of each stop string's prefix that the text ends with
        self._length = 0
        self.held = 0

    def push(self, part: str) -> int | None:
        """Take the next part; the position in the whole text of the first stop string, None if there is none yet."""
        if not self.held and self._stops.starts.isdisjoint(part):
            self._length += len(part)
            return None
        found: tuple[int, int] | None = None  # the end and the beginning of the best match
        for number, (stop, borders) in enumerate(zip(self._stops.strings, self._stops.borders, strict=True)):
            matched = self._matched[number]
            if not matched and stop[0] not in part:
                continue
            for at, character in enumerate(part, self._length + 1):
                while matched and stop[matched] != character:
                    matched = borders[matched - 1]
                matched += stop[matched] == character
                if matched == len(stop):
                    match = at, at - matched
                    found = match if found is None else min(found, match)
                    break
            self._matched[number] = matched
        self._length += len(part)
        if found is not None:
            return found[1]
        self.held = max(self._matched, default=0)
        return None


def _borders(text: str) -> list[int]:
    """For each prefix of the text, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    matched = 0
    for at in range(1, len(text)):
        while matched and text[at] != text[matched]:
            matched = borders[matched - 1]
        matched += text[at] == text[matched]
        borders[at] = matched
    return borders
