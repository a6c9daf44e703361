"""Decoding token ids in tests, whatever the engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skipdecode.engine import Engine, Request, Sampling
from skipdecode.engine.drafts import Planner
from skipdecode.engine.model_spec import READERS
from tiny import LATER, OPTIONS

# Every family of the fast engine that this transformers has; those whose reading is another's, in the slow suite.
_ALIKE = {
    "arcee",
    "cwm",
    "gemma",
    "internlm3",
    "iquestcoder",
    "ministral",
    "ministral3",
    "mistral",
    "olmo3",
    "qwen2",
    "seed_oss",
    "starcoder2",
}
FAST = [
    pytest.param(each, marks=pytest.mark.slow) if each in _ALIKE else each
    for each in sorted(READERS.keys() & {*OPTIONS, *LATER})
]


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


def always_drafts(monkeypatch, count: int = 2) -> None:
    """Have all engines draft so many tokens, whether that pays or not."""
    monkeypatch.setattr(Planner, "count", count, raising=False)
    monkeypatch.setattr(Planner, "plan", Always.plan)


class Always(Planner):
    """Drafts so many tokens, whether that pays or not."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def plan(self, rows, depth, drafters):
        return {drafter: min(self.count, len(drafter.drafts)) for drafter in drafters if drafter.drafts}
