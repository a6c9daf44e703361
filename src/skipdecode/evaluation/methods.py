"""Decoding methods as an evaluation sees them: a schedule on a backend, and what some sequences gave and took.

Greedy only: methods are compared on what they compute. Knows nothing about text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skipdecode.engine.base import Engine
from skipdecode.engine.opening import Backend
from skipdecode.engine.requests import Request
from skipdecode.schedule import Schedule

__all__ = ["Generation", "Method"]


@dataclass(frozen=True)
class Generation:
    """What some sequences gave, and what they took.

    Parameters
    ----------
    tokens : list of list of int
        New tokens of each sequence; the end token, where one came, is the last.
    prompt_seconds : float
        Time in the forwards of prompts.
    decode_seconds : float
        All other time.
    layer_tokens : int
        Sum over the generated tokens that were fed back of the layers they ran. Finished sequences do not count.
    fed_tokens : int
        Generated tokens of the output that had to be fed back: all but each sequence's last.
    positions : int
        Decode steps, from the first new token of a batch to the last of its longest sequence.
    """

    tokens: list[list[int]]
    prompt_seconds: float
    decode_seconds: float
    layer_tokens: int
    fed_tokens: int
    positions: int


class Method:
    """Greedy decoding of a backend's model under a schedule.

    Parameters
    ----------
    backend : Backend
    schedule : Schedule, optional
        Default: full depth, against which other methods are compared.
    name : str, optional
        Label in tables; default: the schedule's.
    """

    def __init__(self, backend: Backend, schedule: Schedule | None = None, name: str | None = None) -> None:
        self.backend = backend
        self.schedule = Schedule.full(backend.num_layers) if schedule is None else schedule
        self.full_depth = self.schedule.is_full
        self.name = name or ("full" if self.full_depth else self.schedule.name)

    @property
    def engine(self) -> str:
        """What runs the model."""
        return self.backend.name

    def make_engine(self, max_rows: int) -> Engine:
        """A new engine that decodes this way, `max_rows` sequences at a time."""
        return self.backend.engine(self.schedule, max_rows=max_rows)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | Sequence[int], eos: set[int], rows: int = 0
    ) -> Generation:
        """Greedy continuations of prompts, given as token ids, none empty.

        `max_new_tokens` is of every sequence or of each; tokens of `eos` end a sequence; `rows` sequences are decoded
        together, 0 for all.
        """
        engine, ends = self.make_engine(rows or len(prompts)), frozenset(eos)
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        pairs = zip(prompts, most, strict=True)
        decoded = engine.decode([Request(tuple(prompt), new, stop_ids=ends) for prompt, new in pairs])
        stats = engine.stats
        return Generation(
            [sequence.tokens for sequence in decoded],
            stats.prompt_seconds,
            stats.after_prompts,
            stats.token_layers,
            stats.fed_tokens,
            stats.steps,
        )

    def settings(self) -> dict[str, Any]:
        """JSON-ready parameters, for the result: the name, and the schedule that skips layers."""
        return {"name": self.name} | ({} if self.full_depth else {"schedule": self.schedule.to_dict()})
