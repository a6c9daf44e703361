"""Which requests join the batch, and when. Pure Python; knows sizes, not tokens.

Batch jobs run in *waves*: requests of like length start together, so that their depths fall together and their ends lie
close. Rows that finish leave at once. The next wave joins when few rows are left (`join_below`): those are at their
shallowest then, and ride along on layers that the young rows must run anyway. `join_below=1` fills every free row at
once (continuous batching); 0 is strict lockstep.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from skipdecode.errors import UsageError

__all__ = ["JOIN_BELOW", "PROMPT_TOKENS", "RequestSize", "Scheduler"]

PROMPT_TOKENS = 512
"""Most prompt tokens of one forward, for jobs."""
JOIN_BELOW = 0.25
"""Of batch jobs: the next wave joins when this share of the rows is left. Measured in docs/LOG.md."""


class RequestSize(NamedTuple):
    """What scheduling needs to know of a request: most new tokens, tokens of its prompt, its number, and the KV pages
    that it may hold at its largest.
    """

    new_tokens: int
    prompt_tokens: int
    request: int
    pages: int = 0


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
        self._queue: deque[RequestSize] = deque()
        self._sorted: list[RequestSize] = []

    def submit(self, sizes: Iterable[RequestSize]) -> None:
        """Queue requests."""
        if self.in_order:
            self._queue.extend(sizes)
            return
        new = list(sizes)
        if len(new) > len(self._sorted):
            self._sorted = sorted(self._sorted + new)
            return
        for size in new:
            bisect.insort(self._sorted, size)

    def drop(self, request: int) -> None:
        """Forget a request that was not admitted yet."""
        self._queue = deque(size for size in self._queue if size.request != request)
        self._sorted = [size for size in self._sorted if size.request != request]

    def clear(self) -> None:
        """Forget all requests that were not admitted yet."""
        self._queue.clear()
        self._sorted.clear()

    @property
    def waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._queue) + len(self._sorted)

    def admit(self, running: int, free_pages: int | None = None) -> list[RequestSize]:
        """The requests that join now, given the rows that are running and the pages that are free (None: unlimited).

        Longest first for batch jobs: the last waves are then the short ones, and the job's tail is short too.
        """
        if running and running > self.join_below * (self.max_rows - 1):
            return []
        chosen: list[RequestSize] = []
        while self.waiting and running + len(chosen) < self.max_rows:
            size = self._queue[0] if self.in_order else self._sorted[-1]
            if free_pages is not None:
                if size.pages > free_pages:
                    break
                free_pages -= size.pages
            chosen.append(self._queue.popleft() if self.in_order else self._sorted.pop())
        return chosen
