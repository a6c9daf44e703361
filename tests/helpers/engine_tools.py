"""Decoding token ids in tests, whatever the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from oracle import active_tokens, oracle_logits
from skipdecode import Schedule
from skipdecode.engine import Engine, Request, Sampling, StepOutput
from skipdecode.engine.drafts import Planner
from skipdecode.engine.model_reader import READERS
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


def outputs_of(engine: Engine, requests: Iterable[Request] = ()) -> list[list[StepOutput]]:
    """The outputs of these requests, and of those that were submitted before, each in a list of its own."""
    rows: dict[int, list[StepOutput]] = {}
    for out in engine.run(requests):
        row = rows.setdefault(out.request, [])
        assert out.position == len(row)
        row.append(out)
    return [rows[number] for number in sorted(rows)]


def tokens_of(engine: Engine, requests: Iterable[Request]) -> list[list[int]]:
    return [row.tokens for row in engine.decode(list(requests))]


def check_greedy(
    model: Any, schedule: Schedule, prompt: Sequence[int], outputs: Sequence[StepOutput], fit: Any = None
) -> None:
    """Check that a row's tokens are the oracle's greedy ones, and their log-probabilities the oracle's too."""
    text, length = torch.tensor([[*prompt, *(out.token for out in outputs)]]), len(prompt)
    with torch.no_grad():
        active = active_tokens(schedule, length, text.shape[1])
        logits = oracle_logits(model, text, torch.ones_like(text), active, fit, schedule, length)
    known = logits[0, length - 1 : -1].log_softmax(-1)
    picked = known[torch.arange(len(outputs)), text[0, length:]]
    torch.testing.assert_close(picked, known.max(-1).values, rtol=0, atol=1e-4)
    logprobs = torch.tensor([out.logprob for out in outputs])
    torch.testing.assert_close(logprobs, picked, rtol=0, atol=1e-4)


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
