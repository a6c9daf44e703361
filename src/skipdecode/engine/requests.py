"""What the engine takes and gives. Pure Python: token ids, no text and no tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Self

from skipdecode.errors import UsageError

__all__ = ["FinishReason", "Request", "Sampling", "StepOutput", "finish_reason", "row_seed"]

FinishReason = Literal["eos", "length", "stop"]
"""Why a row ends: with an end token, at its limit, or because whoever reads it saw a text that stops it."""


@dataclass(frozen=True)
class Sampling:
    """How a row's next token is chosen; every row of a batch may have its own.

    Applied in transformers' order: bias, repetition penalty, temperature, top-k, top-p, min-p.

    Parameters
    ----------
    temperature : float
        0 is greedy; above, logits are divided by it.
    top_k : int
        Only the k most likely tokens; 0 is all.
    top_p : float
        Only the most likely tokens whose probabilities reach p together.
    min_p : float
        Only tokens at least this probable relative to the most likely one.
    repetition_penalty : float
        Logits of tokens seen in prompt or output are divided by it (multiplied where negative); 1 is none.
    seed : int, optional
        Of the row's own random numbers: the same row with the same seed gives the same tokens in any batch.
    logit_bias : mapping of int to float
        Added to tokens' logits.
    top_logprobs : int
        For each new token, the log-probabilities of this many likeliest ones are wanted (`StepOutput.top`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        _check(self.temperature >= 0 and math.isfinite(self.temperature), "temperature", self.temperature, "0 or more")
        _check(self.top_k >= 0, "top_k", self.top_k, "a whole number, 0 (all) or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "a number above 0 and up to 1")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "a number from 0 to 1")
        _check(self.top_logprobs >= 0, "top_logprobs", self.top_logprobs, "0 or more")
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "a number above 0")

    def for_row(self, key: int) -> Self:
        """With a seed of the row's own, made from this one's and the row's key: the draws depend on no batch."""
        return self if self.seed is None else replace(self, seed=row_seed(self.seed, key))

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the most likely token of the untouched logits is the answer."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.logit_bias


@dataclass(frozen=True)
class Request:
    """One prompt.

    Parameters
    ----------
    prompt : tuple of int
        Token ids, at least one.
    max_new_tokens : int
        Most tokens to generate.
    sampling : Sampling
        Default: greedy.
    stop_ids : frozenset of int
        Tokens that end the output; the token itself is part of it.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))
        if not self.prompt:
            raise UsageError("a prompt without tokens is not accepted: give at least one token id")
        _check(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")


class StepOutput(NamedTuple):
    """One new token of one request.

    Parameters
    ----------
    request : int
        Number of the request, in the order of submission.
    position : int
        0 for the request's first new token.
    token : int
        Its id.
    logprob : float
        Natural logarithm of the token's probability under the model (before temperature, penalties and cuts).
    layers : int
        Layers that the token it was predicted from ran.
    finish_reason : {"eos", "length"} or None
        Why the request ends with this token; None if it goes on.
    seconds : float
        Time of the step's end, from the engine's start.
    step_seconds : float
        Duration of the step (the prompt's part, for the first token).
    top : tuple of (int, float)
        Likeliest tokens and their log-probabilities, as many as the request's sampling asks for.
    """

    request: int
    position: int
    token: int
    logprob: float
    layers: int
    finish_reason: FinishReason | None
    seconds: float
    step_seconds: float
    top: tuple[tuple[int, float], ...] = ()


def finish_reason(request: Request, output: list[int]) -> FinishReason | None:
    """Why an output of one or more tokens is complete; None if it goes on."""
    if output[-1] in request.stop_ids:
        return "eos"
    return "length" if len(output) >= request.max_new_tokens else None


def row_seed(seed: int, key: int) -> int:
    """The seed, of 63 bits, of the row `key` of a job whose seed is `seed`."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _check(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value!r} is not accepted: give {accepted}")
