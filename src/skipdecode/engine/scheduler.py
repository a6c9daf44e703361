"""Which sequences join the batch, and when. Pure Python.

Batch jobs run in *waves*: requests of like length start together, so that their depths fall together and their ends lie
close. Rows that finish leave at once. The next wave joins when few rows are left (`join_below`): those are at their
shallowest then, and ride along on layers that the young rows must run anyway. `join_below=1` fills every free row at
once (continuous batching); 0 is strict lockstep.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Iterator
from operator import attrgetter

from skipdecode.engine.sequence import Sequence
from skipdecode.errors import UsageError

__all__ = ["JOIN_BELOW", "PROMPT_TOKENS", "Scheduler"]

PROMPT_TOKENS = 512
"""Most prompt tokens of one forward, for jobs."""
JOIN_BELOW = 0.25
"""Of batch jobs: the next wave joins when this share of the rows is left. Measured in docs/LOG.md."""
_LENGTH = attrgetter("length")


class Scheduler:
    """Admission in length-sorted waves.

    Parameters
    ----------
    max_rows : int
        Most rows at a time.
    join_below : float
        A new wave joins once no more than this share of `max_rows` is running.
    in_order : bool
        Admit in order of submission (a queue of users), not by length (a batch job).
    """

    def __init__(self, max_rows: int, join_below: float = 0.0, *, in_order: bool = False) -> None:
        if max_rows < 1:
            raise UsageError(f"max_rows={max_rows} is not accepted: give 1 or more")
        if not 0 <= join_below <= 1:
            raise UsageError(f"join_below={join_below} is not accepted: give a number from 0 (strict waves) to 1")
        self.max_rows = max_rows
        self.join_below = join_below
        self.in_order = in_order
        # One of the two is used; both take the next request from the end at hand in constant time.
        self._queue: deque[Sequence] = deque()
        self._sorted: list[Sequence] = []

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue sequences."""
        if self.in_order:
            self._queue.extend(sequences)
            return
        new = list(sequences)
        if len(new) > len(self._sorted):
            self._sorted = sorted(self._sorted + new, key=_LENGTH)
            return
        for sequence in new:
            bisect.insort(self._sorted, sequence, key=_LENGTH)

    def drop(self, number: int) -> None:
        """Forget a sequence that was not admitted yet."""
        self._queue = deque(sequence for sequence in self._queue if sequence.number != number)
        self._sorted = [sequence for sequence in self._sorted if sequence.number != number]

    def clear(self) -> None:
        """Forget all sequences that were not admitted yet."""
        self._queue.clear()
        self._sorted.clear()

    @property
    def waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._queue) + len(self._sorted)

    def __iter__(self) -> Iterator[Sequence]:
        """Those, in no order that counts."""
        return iter((*self._queue, *self._sorted))

    def admit(self, running: int, free_pages: int | None = None) -> list[Sequence]:
        """The sequences that join now, given how many run and the pages that are free (None: unlimited).

        Longest first for batch jobs: the last waves are then the short ones, and the job's tail is short too.
        """
        if running and running > self.join_below * (self.max_rows - 1):
            return []
        chosen: list[Sequence] = []
        while self.waiting and running + len(chosen) < self.max_rows:
            sequence = self._queue[0] if self.in_order else self._sorted[-1]
            if free_pages is not None:
                if sequence.pages > free_pages:
                    break
                free_pages -= sequence.pages
            chosen.append(self._queue.popleft() if self.in_order else self._sorted.pop())
        return chosen
