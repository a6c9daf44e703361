"""Input and output of the engine. Pure Python: token ids, no text and no tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, Self

from skipdecode.common.options import Options, option
from skipdecode.engine.rules import Rules
from skipdecode.errors import OptionError, UsageError

FinishReason = Literal["eos", "length", "stop", "error"]
"""The reason why a sequence ended: an end token, its length limit, a stop string, or a grammar that cannot go on."""


BATCH = 8
"""Sequences that are decoded together where a user names no number."""
_LEAST_TEMPERATURE = 0.01
_CUTS = {"top_k": 0, "top_p": 1, "min_p": 0}  # options of sampling alone, with the values that cut nothing


@dataclass(frozen=True)
class SamplingOptions(Rules):
    """The options that `Sampling` shares with the command line."""

    temperature: float = option("below 0.01 greedy; above, logits are divided by it", default=0.0, least=0)
    top_k: int = option("only the k most likely tokens; 0 is all", default=0, least=0)
    top_p: float = option(
        "only the most likely tokens whose probabilities reach p together", default=1.0, above=0, most=1
    )
    min_p: float = option(
        "only tokens at least this probable relative to the most probable token", default=0.0, least=0, most=1
    )
    seed: int | None = option("of the sequence's random numbers, which are the same in any batch", default=None)

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy: logits divided by a lower temperature would overflow."""
        return self.temperature < _LEAST_TEMPERATURE

    def check_effect(self) -> None:
        """Raise OptionError for a value without effect in greedy decoding."""
        for name, neutral in _CUTS.items() if self.is_greedy else ():
            if (value := getattr(self, name)) != neutral:
                accepted = f"{neutral:g}, or a temperature too, such as 0.7: it acts on sampling only"
                raise OptionError(name, value, accepted)


class Grammar(Protocol):
    """What a text has to fit: an `llguidance.LLMatcher` (`skipdecode.generation.grammar`)."""

    def deep_copy(self) -> Grammar: ...
    def compute_bitmask(self) -> bytes: ...
    def compute_ff_tokens(self) -> Sequence[int]: ...
    def consume_token(self, token: int, /) -> object: ...
    def is_error(self) -> bool: ...


@dataclass(frozen=True)
class Sampling(SamplingOptions):
    """The settings by which the next token of a sequence is chosen; every sequence of a batch may have its own.

    Order: bias, transformers' rules in its order, frequency and presence penalty, grammar, temperature,
    top-k, top-p, min-p. `logit_bias` is added to the logits of the tokens that it names.
    `grammar` says which tokens may come; it has taken no token yet.
    """

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    top_logprobs: int | None = option(
        "log-probabilities of each new token and of so many top tokens are returned", default=None, least=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError("logit_bias", self.logit_bias, "token ids with a number each, such as {7: 5.0}")
        for token, value in self.logit_bias.items():
            is_token = isinstance(token, int) and not isinstance(token, bool)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
            if not is_token or not is_number:
                raise OptionError("logit_bias", {token: value}, "a token id with a finite number, such as {7: 5.0}")

    def for_row(self, key: int) -> Self:
        """These settings with a seed made from this seed and the key, so draws do not depend on the batch."""
        return self if self.seed is None else replace(self, seed=row_seed(self.seed, key))

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the most likely token of the unchanged logits."""
        return self.is_greedy and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether rules or a bias change logits."""
        return bool(self.active or self.logit_bias)


@dataclass(frozen=True)
class Request(Options):
    """One prompt of at least one token id; a token of `stop_ids` ends the output and is part of it. Default: greedy.

    A prefix cache, and earlier answers, are shared by requests of the same `cache_salt` only. With `exact`, the fast
    engine drafts where that is faster; the tokens are the same (see `skipdecode.engine.drafts`). With `scores_prompt`,
    the first output has the log-probabilities of the prompt's tokens, and as many top tokens as `sampling` asks for.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = option("most tokens to generate", least=1)
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    exact: bool = True
    scores_prompt: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prompt", tuple(self.prompt))
        object.__setattr__(self, "stop_ids", frozenset(self.stop_ids))
        if not self.prompt:
            raise UsageError("a prompt without tokens is not accepted: give at least one token id")

    def check_vocabulary(self, size: int) -> None:
        """Raise UsageError for a token of the prompt, `logit_bias` or a rule outside a vocabulary of `size` tokens."""
        named = *self.prompt, *self.sampling.logit_bias, *self.sampling.named_tokens
        wrong = next((token for token in named if not 0 <= token < size), None)
        if wrong is not None:
            raise UsageError(f"token {wrong} is outside the model's vocabulary: give token ids from 0 to {size - 1}")


class NextToken(NamedTuple):
    """A token with its log-probability, and the top tokens with theirs, as in `StepOutput`."""

    token: int
    logprob: float = math.nan
    top: tuple[tuple[int, float], ...] = ()


class StepOutput(NamedTuple):
    """One new token of one request."""

    request: int  # number of the request, in the order of submission
    position: int  # 0 for the request's first new token
    token: int
    # Natural logarithm of the token's probability under the model: before bias, penalties, temperature and cuts, as in
    # vLLM's default; so is `top`. NaN if it was not computed, as the request asks for none (`Sampling.top_logprobs`).
    logprob: float
    layers: int  # number of layers that the preceding token ran, from which this token was predicted
    finish_reason: FinishReason | None  # why the request ends with this token, which is no stop string here
    seconds: float  # at the end of the step, from the start of the engine
    step_seconds: float  # of the forward and the choice of tokens
    top: tuple[tuple[int, float], ...] = ()  # top tokens and their log-probabilities, as many as the request asks for
    cached: int = 0  # prompt tokens of the request that came from the prefix cache
    # With the first token of a request with `scores_prompt`: the prompt's tokens from the second on, each with its
    # log-probability after the tokens before it, which ran the schedule's layers for prompts, and its top tokens.
    prompt: tuple[NextToken, ...] = ()


def row_seed(seed: int, key: int) -> int:
    """The 63-bit seed of the sequence `key` in a job with the seed `seed`."""
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
