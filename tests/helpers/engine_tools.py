"""Decoding token ids in tests, whatever the engine."""

from __future__ import annotations

from collections.abc import Sequence

from skipdecode.engine import Engine, Request, Sampling


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
