"""Decoding token ids in tests, whatever the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skipdecode.engine import Engine, Request, Sampling
from skipdecode.engine.drafts import Planner


def decode(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    new: int,
    *,
    ends: Sequence[int] = (),
    sampling: Sampling | None = None,
    keys: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[str]]:
    """New tokens and finish reasons of each prompt; a job's `sampling` gives each row a seed of its own by `keys`."""
    job = sampling or Sampling()
    requests = [
        Request(tuple(prompt), new, job.for_row(key), frozenset(ends))
        for prompt, key in zip(prompts, range(len(prompts)) if keys is None else keys, strict=True)
    ]
    rows = engine.decode(requests)
    return [row.tokens for row in rows], [row.finish_reason for row in rows]


class Always(Planner):
    """Drafts so many tokens, whether that pays or not; with `layers` under the schedule only."""

    least_logprob = -math.inf

    def __init__(self, count: int, layers: bool = False) -> None:
        super().__init__()
        self.count, self.layers = count, layers

    def plan(self, rows, drafters):
        for drafter in drafters:
            drafter.runs = not drafter.schedule.is_full and (self.layers or not drafter.found)
        return [min(self.count, drafter.room) for drafter in drafters]
