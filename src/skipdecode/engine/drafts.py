"""Drafts of exact sequences: their source, and their number. Pure Python.

The text of an exact sequence is that of full depth. Its next tokens are drafted, and one forward at full depth checks
them: drafts are accepted up to the first one that full depth would not have chosen, which full depth's own token
replaces. Drafts come from the text, if its last tokens have occurred before (prompt lookup), else from forwards under
the schedule.

`Planner` says how many tokens each sequence drafts at a step. A draft pays if the forwards with it give more tokens per
second than those without it. Its gain is the chance that full depth accepts it and all drafts before it, estimated from
the earlier drafts of the sequence. Forwards are timed as they run. If nothing pays, nothing is drafted. Drafting under
the schedule ends early at a token that is improbable there, as in Kangaroo (arXiv 2404.18911).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Several

from skipdecode.schedule import Schedule

MOST_DRAFTS = 8
"""Maximum drafts of a sequence at a step."""
_GRAM = 2  # last tokens that must have occurred before
_TEXT_PRIOR, _LAYERS_PRIOR = 0.4, 0.7  # acceptance of drafts before any is checked
_PRIOR_WEIGHT, _LEAST_RATE = 2, 0.05
_THRESHOLDS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
_LOGARITHMS = [math.log(threshold) for threshold in _THRESHOLDS]
_GAIN = 1.1  # minimum expected speed-up of drafting
_PROBE_AFTER = (4, 64)  # steps without drafts under a schedule before the first probe, and most before later ones
_SLOWER_WEIGHT, _LEAST_SECONDS = 0.1, 1e-9
_LEAST_SLOPE = 0.25  # share of the time per row that another row takes at least, if that is not known yet


class Acceptance:
    """The chance that full depth accepts a draft if it accepted those before it: a moving mean.

    Parameters
    ----------
    chance : float
        Initial value.
    common : Acceptance, optional
        Of all sequences; learns too.
    """

    def __init__(self, chance: float, common: Acceptance | None = None) -> None:
        self.chance, self._common, self._seen = chance, common, _PRIOR_WEIGHT

    def of_sequence(self) -> Acceptance:
        """The acceptance of a new sequence, if this is that of all sequences."""
        return Acceptance(self.chance, self)

    def note(self, taken: int, drafted: int) -> None:
        """Learn that the first `taken` of `drafted` tokens were accepted; those after the next were not judged."""
        for hit in [1] * taken + [0] * (taken < drafted):
            self._seen += 1
            self.chance += max(1 / self._seen, _LEAST_RATE) * (hit - self.chance)
        if self._common is not None:
            self._common.note(taken, drafted)


class Drafter:
    """The drafting state of one sequence.

    Parameters
    ----------
    schedule : Schedule
        Drafts tokens; full depth: drafts come from the text only.
    text : sequence of int
        The prompt.
    from_text, from_layers : Acceptance
        Of the drafts of this sequence from either source.
    tokens : set of int
        Tokens of all texts; those of this text are added.

    Attributes
    ----------
    found : tuple of int
        What the text suggests at this step.
    runs : bool
        Whether this step's drafts come from forwards and not from the text.
    """

    def __init__(
        self, schedule: Schedule, text: Several[int], from_text: Acceptance, from_layers: Acceptance, tokens: set[int]
    ) -> None:
        self.schedule, self._seen = schedule, tokens
        self._from_text, self._from_layers = from_text, from_layers
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.found: tuple[int, ...] = ()
        self.runs = False
        self._room = 0
        self._extend(text)

    def look(self, room: int) -> None:
        """Find what the text suggests; at most `room` tokens are drafted."""
        self._room = max(0, min(room, MOST_DRAFTS))
        place = self._after.get(tuple(self._text[-_GRAM:]))
        self.found = () if place is None else tuple(self._text[place : place + self._room])

    @property
    def room(self) -> int:
        """Maximum number of drafts of this step's source."""
        return self._room if self.runs else len(self.found)

    @property
    def acceptance(self) -> Acceptance:
        """Of this step's source."""
        return self._from_layers if self.runs else self._from_text

    def learn(self, drafted: Several[int], tokens: Several[int]) -> None:
        """Learn from a step's drafts and new tokens; what the text suggested is judged too."""
        for source, said in ((self._from_text, self.found), (self._from_layers, drafted if self.runs else ())):
            judged = min(len(said), len(tokens))
            taken = next((i for i in range(judged) if said[i] != tokens[i]), judged)
            source.note(taken, judged)
        self._extend(tokens)

    def _extend(self, tokens: Several[int]) -> None:
        self._seen.update(tokens)
        for token in tokens:
            if len(self._text) >= _GRAM:
                self._after[tuple(self._text[-_GRAM:])] = len(self._text)
            self._text.append(token)


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
        place = bisect.bisect_left(self._rows, rows)
        if rows in self._seconds or (self._rows and not place):
            return self._seconds[self._rows[place]]
        if not self._rows:
            return None
        low = self._rows[place - 1]
        seconds = self._seconds[low]
        if place < len(self._rows):
            high = self._rows[place]
            return seconds + (self._seconds[high] - seconds) * (rows - low) / (high - low)
        slope = _LEAST_SLOPE * seconds / low
        if place > 1:
            before = self._rows[place - 2]
            slope = max(slope, (seconds - self._seconds[before]) / (low - before))
        return seconds + slope * (rows - low)


class Planner:
    """The numbers of drafts, for all engines of a model.

    Attributes
    ----------
    checks, drafts : ForwardTimes
        Of forwards at full depth, and under schedules.
    tokens : set of int
        Tokens that have occurred in texts of exact sequences; drafts choose from them.
    least_logprob : float
        No draft follows a draft whose log-probability under the schedule is lower.
    """

    least_logprob = math.log(0.7)

    def __init__(self) -> None:
        self.checks, self.drafts = ForwardTimes(), ForwardTimes()
        self.tokens: set[int] = set()
        self._common: dict[Schedule | None, Acceptance] = {}
        self._idle, self._patience = 0, _PROBE_AFTER[0]

    def drafter(self, schedule: Schedule, prompt: Several[int]) -> Drafter:
        """The state of a new sequence."""
        text = self._common.setdefault(None, Acceptance(_TEXT_PRIOR)).of_sequence()
        layers = self._common.setdefault(schedule, Acceptance(_LAYERS_PRIOR)).of_sequence()
        return Drafter(schedule, prompt, text, layers, self.tokens)

    def plan(self, rows: int, drafters: Several[Drafter]) -> list[int]:
        """The number of drafts of each of `drafters`, after `Drafter.look`; `rows` sequences decode at this step.

        Also chooses the source of each.
        """
        alone = self.checks(rows)
        nothing = [0] * len(drafters)
        if alone is None:
            return nothing
        best, chosen = _GAIN * rows / alone, nothing
        if self._may_pay(rows, best):
            for drafter in drafters:
                self._choose_source(rows, drafter)
            for counts in set(zip(*map(_counts, drafters), strict=True)):
                rate = self._rate(rows, drafters, counts) if any(counts) else 0.0
                if rate > best:
                    best, chosen = rate, list(counts)
        if any(count and drafter.runs for count, drafter in zip(chosen, drafters, strict=True)):
            self._idle, self._patience = 0, _PROBE_AFTER[0]
            return chosen
        self._idle += 1
        if any(chosen) or self._idle < self._patience:
            return chosen
        # One draft of one sequence measures what may have changed.
        self._idle, self._patience = 0, min(2 * self._patience, _PROBE_AFTER[1])
        return self._probe(drafters)

    def _may_pay(self, rows: int, least: float) -> bool:
        """Whether drafts that are all accepted, and that cost nothing, give more tokens per second than `least`."""
        more = (2**power for power in range(int(math.log2(MOST_DRAFTS * rows)) + 1))
        return any(rows + count > least * (self.checks(rows + count) or 0.0) for count in more)

    def _choose_source(self, rows: int, drafter: Drafter) -> None:
        """Take the source that gives more tokens per second if no other sequence drafts."""
        drafter.runs = not drafter.schedule.is_full
        if drafter.runs and drafter.found:
            layers, drafter.runs = self._best_rate(rows, drafter), False
            drafter.runs = layers > self._best_rate(rows, drafter)

    def _best_rate(self, rows: int, drafter: Drafter) -> float:
        """Expected tokens per second if only this sequence drafts, with the best number of drafts."""
        best, seconds, tokens, gain = 0.0, 0.0, float(rows), 1.0
        draft = self._draft_seconds([drafter]) if drafter.runs else 0.0
        for count in range(1, drafter.room + 1):
            gain *= drafter.acceptance.chance
            tokens, seconds = tokens + gain, seconds + draft
            rate = tokens / ((self.checks(rows + count) or 0.0) + seconds)
            if rate < best:
                break
            best = rate
        return best

    def _draft_seconds(self, drafters: Several[Drafter]) -> float:
        """Seconds of their forward; before any measurement, their share of the layers of a check."""
        known = self.drafts(len(drafters))
        if known is None:
            share = max(drafter.schedule.budget(0) / drafter.schedule.num_layers for drafter in drafters)
            known = share * (self.checks(len(drafters)) or 0.0)
        return known

    def _probe(self, drafters: Several[Drafter]) -> list[int]:
        """One draft of the first sequence that has room for one."""
        for drafter in drafters:
            drafter.runs = not drafter.schedule.is_full
        first = next((i for i, drafter in enumerate(drafters) if drafter.room), None)
        return [int(i == first) for i in range(len(drafters))]

    def _rate(self, rows: int, drafters: Several[Drafter], counts: Several[int]) -> float:
        """Expected tokens per second."""
        seconds = self.checks(rows + sum(counts)) or 0.0
        tokens, running = float(rows), []
        for drafter, count in zip(drafters, counts, strict=True):
            chance = min(drafter.acceptance.chance, 0.99)
            tokens += chance * (1 - chance**count) / (1 - chance)
            running += [(drafter, count)] if drafter.runs and count else []
        for step in range(max((count for _, count in running), default=0)):
            seconds += self._draft_seconds([drafter for drafter, count in running if count > step])
        return tokens / seconds


def _counts(drafter: Drafter) -> list[int]:
    """For each threshold, the number of drafts that are all accepted with at least this chance."""
    chance, room = min(drafter.acceptance.chance, 0.99), drafter.room
    if chance < _THRESHOLDS[-1]:
        return [0] * len(_THRESHOLDS)
    one = math.log(chance)
    return [min(room, int(all_of_them / one)) for all_of_them in _LOGARITHMS]
