"""Drafts: several tokens of a sequence in one forward, and the same text. Pure Python.

The next tokens of a sequence are guessed where its last tokens have occurred before: in its prompt, in its output, or
in an earlier answer (as prompt lookup does with a text alone). One forward runs the last token and the drafts on the
layers of the schedule. Drafts are accepted up to the first one that the forward would not have chosen, which the
forward's own token replaces. So the tokens are those of the schedule without drafts.

`Planner` says how many tokens each sequence drafts at a step. A draft pays if the tokens that it is expected to give
take less time than tokens without drafts. The chance that a draft is accepted is estimated from earlier drafts, of the
sequence and of all, for each length of the text that had occurred before. Forwards are timed as they run.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

MOST_DRAFTS = 8
"""Maximum drafts of a sequence at a step."""
_END = -1  # follows an answer
_MOST_POSITIONS, _LONGEST = 8, 16  # earlier positions that are compared, the latest ones; tokens before them that count
_CLASSES = (2, 3, 4, 6, 9)  # lengths of a match from which the chance of acceptance is another
_CHANCES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # before any draft is checked
_PRIOR_WEIGHT, _LEAST_RATE = 2, 0.05
_THRESHOLDS = {threshold: math.log(threshold) for threshold in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)}
_MOST_CHANCE = 0.75  # drafts that need more are not tried
_GAIN = 1.2  # tokens per second of the drafts alone, over those of the forward without them
_MOST_ROWS = 16  # sequences beside which nothing is drafted: a token more costs what a token costs (0.94 to 1.0 at 32)
_PROBE_AFTER = (4, 64)  # steps without drafts before the first probe, and most before later ones
_SLOWER_WEIGHT, _LEAST_SECONDS = 0.1, 1e-9
_LEAST_SLOPE = 0.25  # share of the time per row that another row takes at least, if that is not known yet
_MOST_TOKENS, _MOST_SALTS = 2**15, 8  # of earlier answers
_BEFORE = 4  # last tokens of its prompt that are kept before an answer


class TextIndex:
    """Tokens, and the positions that follow each token and each pair of tokens.

    Attribute `tokens`: the text.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        self._before: tuple[list[int], list[int]] = [], []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            for width, before in enumerate(self._before, 1):
                key = tuple(self.tokens[-width:])
                before.append(self._latest.get(key, -1))
                self._latest[key] = len(self.tokens)
            self.tokens.append(token)

    def longest(self, tail: Sequence[int]) -> tuple[int, int]:
        """Longest match of the end of `tail`: how many tokens are the same, at most 16, and the position that follows.

        Positions are those of the last pair, the latest 8, else of the last token. (0, 0) if there is none.
        """
        best, text = (0, 0), self.tokens
        for width in (2, 1):
            position = self._latest.get(tuple(tail[-width:]), -1)
            for _ in range(_MOST_POSITIONS):
                if position < 0:
                    break
                most, same = min(position, len(tail), _LONGEST), width
                while same < most and text[position - same - 1] == tail[-same - 1]:
                    same += 1
                best = max(best, (same, position))
                position = self._before[width - 1][position]
            if best[0]:
                break
        return best

    def following(self, position: int, most: int) -> tuple[int, ...]:
        """The tokens from a position on, not beyond the end of an answer."""
        tokens = self.tokens[position : position + most]
        return tuple(tokens[: tokens.index(_END)] if _END in tokens else tokens)


class Acceptance:
    """The chance that a draft is accepted if those before it were: a moving mean.

    It begins as `chance`, or as that of all sequences, `common`, which learns too.
    """

    def __init__(self, chance: float = 0.0, common: Acceptance | None = None) -> None:
        self.chance: float = common.chance if common else chance
        self._common, self._seen = common, _PRIOR_WEIGHT

    def note(self, taken: int, drafted: int) -> None:
        """Learn that the first `taken` of `drafted` tokens were accepted; those after the next were not judged."""
        for hit in [1] * taken + [0] * (taken < drafted):
            self._seen += 1
            self.chance += max(1 / self._seen, _LEAST_RATE) * (hit - self.chance)
        if self._common is not None:
            self._common.note(taken, drafted)


class Drafter:
    """The drafting state of one sequence: its text, first the prompt, and the `drafts` of a step.

    `earlier` are earlier answers; `common` is the acceptance of all sequences, for each class of length of a match.
    """

    def __init__(self, text: Sequence[int], earlier: TextIndex, common: Sequence[Acceptance]) -> None:
        self._text, self._earlier, self._common = TextIndex(), earlier, common
        self._acceptance: dict[int, Acceptance] = {}
        self._class = 0
        self.drafts: tuple[int, ...] = ()
        self._text.extend(text)

    def find(self, room: int) -> None:
        """Find drafts, at most `room`: what followed the longest match, in the sequence's own text if both are as long.

        Without room none are sought.
        """
        self.drafts = ()
        if room > 0:
            pairs = [(source, *source.longest(self._text.tokens)) for source in (self._text, self._earlier)]
            source, same, position = max(pairs, key=lambda pair: pair[1])
            self.drafts = source.following(position, room) if same else ()
            self._class = bisect.bisect(_CLASSES, same)

    @property
    def chance(self) -> float:
        """Probability that a draft of this step is accepted if all drafts before it were."""
        return min(self._learned().chance, 0.99)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the new tokens of a step; drafts that did not run are judged too."""
        if judged := min(len(self.drafts), len(tokens)):
            taken = next((i for i in range(judged) if self.drafts[i] != tokens[i]), judged)
            self._learned().note(taken, judged)
        self.drafts = ()
        self._text.extend(tokens)

    def _learned(self) -> Acceptance:
        if self._class not in self._acceptance:
            self._acceptance[self._class] = Acceptance(common=self._common[self._class])
        return self._acceptance[self._class]


class ForwardTimes:
    """Seconds of a forward by its rows: interpolated between measured ones, extrapolated conservatively."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._seconds: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Add a measurement. Disturbances only make forwards slower, so a shorter time replaces a longer one."""
        seconds = max(seconds, _LEAST_SECONDS)
        if rows not in self._seconds:
            bisect.insort(self._rows, rows)
            self._seconds[rows] = seconds
        known = self._seconds[rows]
        self._seconds[rows] = seconds if seconds < known else known + _SLOWER_WEIGHT * (seconds - known)

    def __call__(self, rows: int) -> float | None:
        """Seconds of a forward of `rows` rows; None before any measurement."""
        position = bisect.bisect_left(self._rows, rows)
        if rows in self._seconds or (self._rows and not position):
            return self._seconds[self._rows[position]]
        if not self._rows:
            return None
        low = self._rows[position - 1]
        seconds = self._seconds[low]
        if position < len(self._rows):
            high = self._rows[position]
            return seconds + (self._seconds[high] - seconds) * (rows - low) / (high - low)
        slope = _LEAST_SLOPE * seconds / low
        if position > 1:
            before = self._rows[position - 2]
            slope = max(slope, (seconds - self._seconds[before]) / (low - before))
        return seconds + slope * (rows - low)


class Planner:
    """The numbers of drafts, for all engines of a model.

    Attribute `forwards`: of forwards without prompts, by the mean number of layers of a token, rounded.
    """

    def __init__(self) -> None:
        self.forwards: defaultdict[int, ForwardTimes] = defaultdict(ForwardTimes)
        self._common = [Acceptance(chance) for chance in _CHANCES]
        self._earlier: dict[str, TextIndex] = {}
        self._idle, self._patience = 0, _PROBE_AFTER[0]

    def drafter(self, prompt: Sequence[int], salt: str = "") -> Drafter:
        """The state of a new sequence, which may draft from the earlier answers of the same `Request.cache_salt`."""
        if salt not in self._earlier and len(self._earlier) == _MOST_SALTS:
            del self._earlier[next(iter(self._earlier))]
        return Drafter(prompt, self._earlier.setdefault(salt, TextIndex()), self._common)

    def remember(self, prompt: Sequence[int], answer: Sequence[int], salt: str = "") -> None:
        """Let later sequences of the same salt draft from an answer; the oldest half goes when there are too many."""
        if (index := self._earlier.get(salt)) is None:
            return
        index.extend((*prompt[-_BEFORE:], *answer, _END))
        if len(index.tokens) > _MOST_TOKENS:
            self._earlier[salt] = half = TextIndex()
            half.extend(index.tokens[-_MOST_TOKENS // 2 :])

    def _least_chance(self, rows: int, depth: int) -> float:
        """The chance of acceptance from which a draft can pay; infinity if it cannot, or if nothing is known of it."""
        seconds = self.forwards[depth]
        if (alone := seconds(rows)) is None:
            return math.inf
        draft_counts = (2**power for power in range(int(math.log2(MOST_DRAFTS * rows)) + 1))
        least = min(_GAIN * rows * ((seconds(rows + count) or 0.0) / alone - 1) / count for count in draft_counts)
        return least if least < _MOST_CHANCE else math.inf

    def plan(self, rows: int, depth: int, drafters: Iterable[Drafter]) -> dict[Drafter, int]:
        """The numbers of drafts of the drafters that draft, of those that `drafters` yields after `Drafter.find`.

        `rows` sequences decode at this step, through `depth` layers. None is sought where drafts cannot pay, but one
        is drafted now and then, to measure what may have changed.
        """
        self._idle += 1
        least, seconds, chosen = self._least_chance(rows, depth), self.forwards[depth], dict[Drafter, int]()
        if rows > _MOST_ROWS or (least == math.inf and self._idle < self._patience):
            return {}
        candidates = [(drafter, drafter.chance) for drafter in drafters if drafter.drafts]
        drafting = [(drafter, chance) for drafter, chance in candidates if chance >= least]
        alone, best = seconds(rows) or math.inf, 0.0
        for threshold, logarithm in _THRESHOLDS.items() if drafting else ():
            if threshold < least:
                break
            # Drafts that are accepted, with all before them, with at least this chance.
            counts = [min(len(d.drafts), int(logarithm / math.log(chance))) for d, chance in drafting]
            if count := sum(counts):
                tokens = sum(c * (1 - c**n) / (1 - c) for n, (_, c) in zip(counts, drafting, strict=True))
                longer = seconds(rows + count) or math.inf
                rate = (rows + tokens) / longer
                if tokens * alone > _GAIN * rows * (longer - alone) and rate > best:
                    best, chosen = rate, {d: n for n, (d, _) in zip(counts, drafting, strict=True) if n}
        if chosen:
            self._idle, self._patience = 0, _PROBE_AFTER[0]
        elif candidates and self._idle >= self._patience:
            chosen = {max(candidates, key=lambda candidate: candidate[1])[0]: 1}
            self._idle, self._patience = 0, min(2 * self._patience, _PROBE_AFTER[1])
        return chosen
