"""The interface of a decoding method: a name for tables, what it needs of a model, and the engine that does it.

Greedy only: methods are compared on what they compute, not on luck. Knows nothing about text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from skipdecode.engine.base import Engine
from skipdecode.engine.generate import GenerateEngine
from skipdecode.engine.requests import Request
from skipdecode.errors import UsageError
from skipdecode.models.families import decoder_layers, find_family, unwrap
from skipdecode.schedule import Schedule

__all__ = ["GenerateMethod", "Generation", "Method", "Untouched"]


@dataclass(frozen=True)
class Generation:
    """What some rows gave, and what they took.

    Parameters
    ----------
    tokens : list of list of int
        New tokens of each row; the end token, where one came, is the last.
    prompt_seconds : float
        Time in the forwards of prompts.
    decode_seconds : float
        All other time.
    layer_tokens : int
        Sum over the generated tokens that were fed back of the layers they ran; of a method that drafts, all layers
        that ran behind the prompt, drafts and their checks included. Rows that have ended do not count.
    fed_tokens : int
        Generated tokens of the output that had to be fed back: all but each row's last.
    positions : int
        Decode steps, from the first new token of a batch to the last of its longest row.
    """

    tokens: list[list[int]]
    prompt_seconds: float
    decode_seconds: float
    layer_tokens: int
    fed_tokens: int
    positions: int


class Method(ABC):
    """One way of decoding.

    Attributes
    ----------
    name : str
        Label in tables.
    schedule : Schedule or None
        The schedule that runs, where the method is one.
    max_batch : int or None
        Most rows of a batch; None for any number.
    full_depth : bool
        Whether it is full depth itself, the yardstick.
    engine : str
        What runs the model (`Engine.name`).
    """

    name: str
    schedule: Schedule | None = None
    max_batch: int | None = None
    full_depth: bool = False
    engine: str = GenerateEngine.name

    @abstractmethod
    def make_engine(self, model: Any, max_rows: int) -> Engine:
        """A new engine that decodes this way, `max_rows` rows at a time.

        `model` is a transformers causal LM in eval mode with nothing attached; it is left as it was.
        """

    def generate(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        eos: set[int],
        rows: int = 0,
    ) -> Generation:
        """Greedy continuations.

        `model` is in eval mode with nothing attached, and left as it was; `prompts` are token ids, none empty;
        `max_new_tokens` is of every row or of each; tokens of `eos` end a row; `rows` are decoded together, 0 for all.
        Raises UsageError if the method does not decode so many rows together.
        """
        together = rows or len(prompts)
        if self.max_batch is not None and together > self.max_batch:
            raise UsageError(f"{self.name} decodes {self.max_batch} row at a time: give --batch-size {self.max_batch}")
        engine = self.make_engine(model, together)
        ends = frozenset(eos)
        most = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
        pairs = zip(prompts, most, strict=True)
        decoded = engine.decode([Request(tuple(prompt), new, stop_ids=ends) for prompt, new in pairs])
        stats = engine.stats
        return Generation(
            [row.tokens for row in decoded],
            stats.prompt_seconds,
            stats.after_prompts,
            stats.token_layers,
            stats.fed_tokens,
            stats.steps,
        )

    def settings(self) -> dict[str, Any]:
        """JSON-ready parameters of the method, for the result."""
        return {"name": self.name}

    def check(self, model: Any) -> None:
        """Refuse a model that the method does not fit; raises a `SkipDecodeError` that says why."""
        find_family(unwrap(model))
        self.check_shape(unwrap(model).config.model_type, len(decoder_layers(unwrap(model))))

    def check_shape(self, model_type: str, num_layers: int) -> None:  # noqa: B027  # most fit all
        """The part of `check` that needs no weights."""


class GenerateMethod(Method):
    """A method that is a call of transformers' `generate`; subclasses say what goes around it and into it."""

    def around(self, model: Any, eos: frozenset[int]) -> AbstractContextManager[Any]:
        """What must hold while the model generates, see `GenerateEngine`; by default nothing."""
        return nullcontext()

    def options(self) -> dict[str, Any]:
        """Further arguments of `generate`."""
        return {}

    def make_engine(self, model: Any, max_rows: int) -> Engine:
        around = partial(self.around, model)
        return GenerateEngine(model, max_rows=max_rows, options=self.options(), around=around)


class Untouched(GenerateMethod):
    """`generate` as it is: the yardstick of the methods that live inside it."""

    name = "full"
    full_depth = True
