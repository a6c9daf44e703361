"""What an evaluation is told: how it is done, what is evaluated, and who hears of its progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from skipdecode.errors import UsageError
from skipdecode.evaluation.methods.base import Method, Untouched
from skipdecode.evaluation.methods.scheduled import Full

__all__ = ["Progress", "Settings", "Subject"]


@dataclass(frozen=True)
class Settings:
    """How a run is done.

    Parameters
    ----------
    batch_size : int
        Rows of a batch, also of full depth beside the method.
    max_new_tokens : int, optional
        In place of the task's.
    full_depth : bool
        Run full depth on the same batches, for fidelity and measured speed.
    teacher_forced : bool
        Score a schedule along full depth's outputs too, which takes about as long as generating them.
    resamples, seed : int
        Of the bootstrap intervals.
    samples : int
        Outputs copied into the result for readers.
    """

    batch_size: int = 16
    max_new_tokens: int | None = None
    full_depth: bool = True
    teacher_forced: bool = True
    resamples: int = 1000
    seed: int = 0
    samples: int = 8

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_new_tokens", "resamples", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} is not accepted: give 1 or more")


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Parameters
    ----------
    model : transformers causal LM
        In eval mode, nothing attached.
    tokenizer : transformers tokenizer
        The model's.
    eos : set of int
        Tokens that end an output.
    context : int, optional
        Tokens that the model's positions reach.
    full : sequence of Method
        Full depth on every engine that methods use: each method is compared with the one on its own.
    """

    model: Any
    tokenizer: Any
    eos: set[int]
    context: int | None = None
    full: Sequence[Method] = field(default_factory=lambda: (Full(), Untouched()))


class Progress:
    """Told what is being done; this one says nothing."""

    def stage(self, name: str, total: int) -> AbstractContextManager[Any]:
        """A context whose value has ``update(count)``, for a stage of `total` records."""
        return nullcontext(_Silent())

    def left_out(self, records: Sequence[tuple[int, str]]) -> None:
        """Line and reason of each record that is not evaluated, if any."""


class _Silent:
    def update(self, count: int) -> None:
        """Nothing."""
