"""Decides which sequences join the batch, and when. Pure Python.

A batch job admits sequences in groups of similar length. The sequences of a group start together, so their depths fall
together and they end at similar times. Finished sequences leave at once. The next group joins when few sequences are
left (`refill_below`). These run few layers by then, and the new sequences need those layers anyway. `refill_below=1` is
continuous batching: a free slot is filled at once. `refill_below=0` is static batching: a group starts only when all
sequences have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import attrgetter

from skipdecode.engine.sequence import Sequence
from skipdecode.errors import UsageError

PROMPT_TOKENS = 512
"""Maximum prompt tokens of one forward in batch jobs."""
REFILL_BELOW = 0.25
"""In batch jobs, the next group joins when at most this share of the slots is in use. Measured in docs/LOG.md."""


class Scheduler:
    """Queue that admits sequences in groups of similar length.

    `max_rows`: maximum number of running sequences. `refill_below`: a new group joins when at most this share of
    `max_rows` is running. `in_order`: admit in order of submission (a queue of users), not by length (a batch job).
    """

    def __init__(self, max_rows: int, refill_below: float = 0.0, *, in_order: bool = False) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows} is not accepted: give 1 or more")
        if not 0 <= refill_below <= 1:
            raise UsageError(f"refill_below={refill_below} is not accepted: give a number from 0 (static) to 1")
        self.max_rows = max_rows
        self.refill_below = refill_below
        self.in_order = in_order
        self._queue: deque[Sequence] = deque()  # the next to be admitted first

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences."""
        self._queue.extend(sequences)
        if not self.in_order:
            self._queue = deque(sorted(self._queue, key=attrgetter("sort_key"), reverse=True))

    def drop(self, number: int) -> None:
        """Forget a sequence that was not admitted yet."""
        self._queue = deque(sequence for sequence in self._queue if sequence.number != number)

    def clear(self) -> None:
        """Forget all sequences that were not admitted yet."""
        self._queue.clear()

    @property
    def waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._queue)

    def admit(self, running: int) -> list[Sequence]:
        """Take the sequences that join now, given the number of running sequences.

        In batch jobs the longest come first. The last groups then have short sequences, so few slots idle at the end.
        """
        # Less one: at a share of 1, one free slot is enough.
        if running and running > self.refill_below * (self.max_rows - 1):
            return []
        count = min(self.waiting, self.max_rows - running)
        return [self._queue.popleft() for _ in range(count)]
