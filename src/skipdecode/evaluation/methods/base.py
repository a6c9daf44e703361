"""The interface of a decoding method: token ids of prompts in, token ids of outputs out, with its time and its depth.

Greedy only: methods are compared on what they compute, not on luck. Knows nothing about text.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipdecode.engine import transformers_backend
from skipdecode.errors import UsageError
from skipdecode.models.families import decoder_layers, find_family, unwrap
from skipdecode.schedule import Schedule

__all__ = ["Generation", "LayerCount", "Method", "Timed", "end_tokens", "fed_tokens", "left_pad"]


@dataclass(frozen=True)
class Generation:
    """What one batch gave, and what it took.

    Parameters
    ----------
    tokens : list of list of int
        New tokens of each row; the end token, where one came, is the last.
    prompt_seconds : float
        Until the first new tokens were there.
    decode_seconds : float
        From there to the end.
    layer_tokens : int
        Sum over the generated tokens that were fed back of the layers they ran; of a method that drafts, all layers
        that ran behind the prompt, drafts and their checks included. Rows that have ended do not count.
    fed_tokens : int
        Generated tokens of the output that had to be fed back: all but each row's last.
    """

    tokens: list[list[int]]
    prompt_seconds: float
    decode_seconds: float
    layer_tokens: int
    fed_tokens: int

    @property
    def positions(self) -> int:
        """Steps from the first new token to the last, of the longest row: what decode time is spent on in lockstep."""
        return max(0, max(map(len, self.tokens), default=0) - 1)


class Method(ABC):
    """One way of decoding.

    Attributes
    ----------
    name : str
        For tables.
    schedule : Schedule or None
        The schedule, where the method is one.
    max_batch : int or None
        Most rows of a batch; None for any number.
    lossless : bool
        Whether the output is full depth's by construction.
    full_depth : bool
        Whether it is full depth itself, the yardstick.
    engine : {"transformers", "fast"}
        What runs the model.
    rows_leave : bool
        Whether rows that have ended leave the batch. If not, they are decoded on to the end of the longest.
    """

    name: str
    schedule: Schedule | None = None
    max_batch: int | None = None
    lossless: bool = False
    full_depth: bool = False
    engine: str = "transformers"
    rows_leave: bool = False

    @abstractmethod
    def generate(
        self, model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos: set[int]
    ) -> Generation:
        """Greedy continuations of a batch.

        Parameters
        ----------
        model : transformers causal LM
            In eval mode, nothing attached; left as it was.
        prompts : sequence of sequence of int
            Token ids, none empty.
        max_new_tokens : int
            Longest output.
        eos : set of int
            Tokens that end a row.
        """

    def settings(self) -> dict[str, Any]:
        """JSON-ready parameters of the method, for the result."""
        return {"name": self.name}

    def check(self, model: Any) -> None:
        """Refuse a model that the method does not fit; raises a `SkipDecodeError` that says why."""
        find_family(unwrap(model))


class Timed(Method):
    """A method that is a call of transformers' `generate`; subclasses say what goes around it and into it."""

    def session(self, model: Any, eos: set[int]) -> AbstractContextManager[Any]:
        """What must hold while the model generates."""
        return nullcontext()

    def options(self) -> dict[str, Any]:
        """Further arguments of `generate`."""
        return {}

    def layer_tokens(self, rows: list[list[int]], prompt_tokens: int, num_layers: int, session: Any) -> int:
        """`Generation.layer_tokens`; `session` is what entering `session` gave. Default: every layer."""
        return num_layers * fed_tokens(rows)

    def generate(
        self, model: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos: set[int]
    ) -> Generation:
        """See `Method.generate`."""
        from transformers import StoppingCriteriaList

        if self.max_batch is not None and len(prompts) > self.max_batch:
            raise UsageError(f"{self.name} decodes {self.max_batch} row at a time: give --batch-size {self.max_batch}")
        pad = min(eos) if eos else 0
        tokens, mask = left_pad(prompts, pad, model.device)
        clock = _Clock(model.device)
        with torch.inference_mode(), self.session(model, eos) as session:
            start = clock.now()
            output = model.generate(
                input_ids=tokens,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                eos_token_id=sorted(eos) or None,
                pad_token_id=pad,
                stopping_criteria=StoppingCriteriaList([clock]),
                **self.options(),
            )
            end = clock.now()
        rows = [_until_end(row, eos) for row in output[:, tokens.shape[1] :].tolist()]
        first = end if clock.first is None else clock.first
        count = self.layer_tokens(rows, tokens.numel(), len(decoder_layers(unwrap(model))), session)
        return Generation(rows, first - start, end - first, count, fed_tokens(rows))


def fed_tokens(rows: Sequence[Sequence[int]]) -> int:
    """Tokens of the output that were fed back: all but each row's last."""
    return sum(max(0, len(row) - 1) for row in rows)


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a text: those of the model's generation config and the tokenizer's own."""
    return set(transformers_backend.end_tokens(model, tokenizer))


def left_pad(prompts: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, each (rows, longest prompt), with the padding on the left."""
    return transformers_backend.left_pad(prompts, pad, device)


def _until_end(row: list[int], eos: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(row) if token in eos), len(row) - 1)
    return row[: end + 1]


class _Clock:
    """A stopping criterion that never stops: `generate` calls it after each step, so it knows when the first ended."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.first: float | None = None

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self.first is None:
            self.first = self.now()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class LayerCount:
    """Counts layers x tokens that run within it, by a hook on each layer (microseconds a call)."""

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(unwrap(model))
        self.total = 0

    def __enter__(self) -> LayerCount:
        self._handles = [layer.register_forward_pre_hook(self._add, with_kwargs=True) for layer in self._layers]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _add(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        self.total += hidden.shape[0] * hidden.shape[1]
