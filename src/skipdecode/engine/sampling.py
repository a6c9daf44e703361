"""Chooses next tokens from logits. Each sequence has its own settings, history and random numbers.

The choice of a sequence depends on its logits and its own generator only, not on the other sequences of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from skipdecode.engine.base import NextToken
from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kernels.native import greedy
from skipdecode.engine.requests import Request, Sampling

_MOST_TOP = 128  # largest top-k for which candidates are sought
_LEAST = -1e30  # finite also after the division by a temperature
_TRIED = 8  # top tokens of a greedy row that are tried before all that a grammar allows
_NEAR = 512  # top tokens among which a nucleus is sought first: to sort a whole vocabulary takes milliseconds


class Sampler:
    """One sequence's settings and state.

    The repetition penalty sees prompt and output, as in transformers; frequency and presence penalty see the output
    alone, as at OpenAI.

    Attributes `top`: the number of top tokens whose logits are enough for the choice: 1 if greedy, k for top-k; 0: all
    tokens. A greedy choice that the grammar does not allow needs all tokens too. `failed`: whether the grammar allows
    no token, or takes too much work.
    """

    def __init__(
        self, sampling: Sampling, prompt: tuple[int, ...], min_tokens: int = 0, ends: Collection[int] = ()
    ) -> None:
        self.sampling, self.failed = sampling, False
        self._grammar: Any = None if sampling.grammar is None else sampling.grammar.deep_copy()
        self._early, self._ends = min_tokens, torch.tensor(sorted(ends) if min_tokens else [], dtype=torch.int64)
        self.is_plain_greedy = sampling.is_plain_greedy
        self._prompt = torch.tensor(sorted(set(prompt)) if sampling.repetition_penalty != 1 else [], dtype=torch.int64)
        self._output: Counter[int] | None = Counter() if sampling.penalises else None
        self.top = 0
        if not (sampling.penalises or sampling.logit_bias or sampling.top_logprobs is not None):
            top_k = 0 if self._grammar is not None or min_tokens else sampling.top_k
            self.top = top_k if top_k <= _MOST_TOP else 0
            if sampling.is_greedy:
                self.top = 1 if self._grammar is None else _TRIED
        self._bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            ids, values = zip(*sampling.logit_bias.items(), strict=True)
            self._bias = torch.tensor(ids), torch.tensor(values, dtype=torch.float32)
        self._generator: torch.Generator | None = None
        if not sampling.is_greedy:
            self._generator = torch.Generator()
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed)

    @classmethod
    def of(cls, request: Request) -> Self:
        """For a new sequence."""
        return cls(request.sampling, request.prompt, request.min_tokens, request.stop_ids)

    def takes(self, token: int) -> bool:
        """Whether the top token may be the next one; if so, it is."""
        if self._early > 0 and token in self._ends:
            return False
        if self._grammar is not None:
            if not self._grammar.compute_bitmask()[token >> 3] >> (token & 7) & 1:
                return False
            self._advance(token)
        self._early -= 1
        return True

    def forced_tokens(self) -> list[int]:
        """The next tokens of which the grammar allows no others; drafts, because `pick` takes them all the same."""
        return [] if self._grammar is None or self.failed else list(self._grammar.compute_ff_tokens())

    def pick(self, logits: Tensor) -> int:
        """The next token from logits (vocabulary,), fp32 on the CPU; the logits are not changed."""
        if self._bias is not None or self._output is not None or self._early > 0:
            logits = logits.clone()
        if self._early > 0:
            logits[self._ends] = -math.inf
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        if self._output is not None:
            self._penalise(logits, self._output)
        allowed = None if self._grammar is None else self._allowed(len(logits))
        if allowed is not None:
            logits = logits[allowed].clamp_(min=_LEAST)  # ends before `min_tokens` have minus infinity
        token = int(logits.argmax()) if self._generator is None else self._draw(logits, self._generator)
        token = token if allowed is None else int(allowed[token])
        if self._output is not None:
            self._output[token] += 1
        if self._grammar is not None:
            self._advance(token)
        self._early -= 1
        return token

    def first(self, candidates: Candidates, row: int) -> int | None:
        """The most likely token of a greedy row that may be the next one, if it is among its `top` most likely ones."""
        count = candidates.counts[row]
        logits, order = candidates.logits[row, :count].sort(descending=True, stable=True)
        near = order[logits >= logits[min(self.top, count) - 1]]
        return next((token for token in candidates.words[row, near].tolist() if self.takes(token)), None)

    def _allowed(self, size: int) -> Tensor:
        """The tokens of a vocabulary that the grammar allows, ascending; all if there are none (`_advance` fails)."""
        bits = np.frombuffer(self._grammar.compute_bitmask(), dtype=np.uint8)
        found = np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little"))
        return torch.from_numpy(found) if len(found) else torch.arange(size)

    def _advance(self, token: int) -> None:
        """Give a new token to the grammar. A grammar that can go no further allows end tokens alone."""
        self._grammar.consume_token(token)
        self.failed = self._grammar.is_error()

    def _penalise(self, logits: Tensor, output: Counter[int]) -> None:
        s, new = self.sampling, torch.tensor(list(output), dtype=torch.int64)
        if s.repetition_penalty != 1:
            # A token of prompt and output is listed twice and gets the same value twice.
            seen = torch.cat((self._prompt, new))
            values = logits[seen]
            logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        if s.frequency_penalty or s.presence_penalty:
            times = torch.tensor(list(output.values()), dtype=torch.float32)
            logits[new] -= s.frequency_penalty * times + s.presence_penalty

    def _draw(self, logits: Tensor, generator: torch.Generator) -> int:
        s, tokens = self.sampling, None
        if 0 < s.top_k <= len(logits):
            # The first of equal logits, so that the candidates give the same token as the whole vocabulary.
            near = (logits >= logits.topk(s.top_k).values[-1]).nonzero()[:, 0]
            tokens = near[logits[near].sort(descending=True, stable=True).indices[: s.top_k]]
            logits = logits[tokens]
        logits = logits / s.temperature
        if s.top_p < 1:
            logits, order = _nucleus(logits, s.top_p)
            tokens = order if tokens is None else tokens[order]
        probs = logits.softmax(0)
        if s.min_p > 0:
            probs = probs.masked_fill(probs < s.min_p * probs.max(), 0)
        index = int(torch.multinomial(probs, 1, generator=generator))
        return index if tokens is None else int(tokens[index])


def _nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Logits and positions of the fewest most probable tokens that reach `top_p` together, the best first."""
    near, total = torch.arange(len(logits)), logits.logsumexp(0)
    if len(logits) > _NEAR:
        top = logits.topk(_NEAR).values
        if (top - total).exp().sum() >= top_p:
            near = (logits >= top[-1]).nonzero()[:, 0]
    best, order = logits[near].sort(descending=True, stable=True)
    probs = (best - total).exp()
    reached = probs.cumsum(0)
    # A token stays if those before it do not reach p yet. The first stays even if p is 0 in fp32.
    count = max(1, int((reached - probs < top_p).sum()))
    return best[:count], near[order[:count]]


class Predicted:
    """The predictions of a forward: gives the next token after each wanted row to the sampler of its sequence.

    `logits`: (rows, vocabulary), fp32; or the tokens that are enough for the `Sampler.top` of each row.
    """

    def __init__(self, logits: Tensor | Candidates) -> None:
        self._logits = logits

    @cached_property
    def _greedy(self) -> tuple[list[int], list[float]]:
        if isinstance(self._logits, Candidates):
            return self._logits.best, [math.nan] * len(self._logits.best)
        return greedy(self._logits)

    @cached_property
    def _local(self) -> Tensor:
        return self._logits.cpu()  # type: ignore[union-attr]  # of tensors only

    def token(self, row: int, sampler: Sampler) -> NextToken:
        """The token that a sampler chooses from a row's logits.

        Its log-probability is that under the untouched logits (of candidates: NaN).
        """
        found = self._logits
        if sampler.is_plain_greedy and sampler.takes(self._greedy[0][row]):
            chosen, logprob = self._greedy[0][row], self._greedy[1][row]
        elif isinstance(found, Candidates) and not sampler.is_plain_greedy:
            return NextToken(int(found.words[row, sampler.pick(found.logits[row, : found.counts[row]])]))
        elif isinstance(found, Candidates) and (best := sampler.first(found, row)) is not None:
            return NextToken(best)
        else:
            values = found.full(row) if isinstance(found, Candidates) else self._local[row]
            chosen = sampler.pick(values)
            logprob = float(values[chosen] - values.logsumexp(-1))
        count = sampler.sampling.top_logprobs
        if not count or isinstance(found, Candidates):
            return NextToken(chosen, logprob)
        return NextToken(chosen, logprob, scores(found[row : row + 1], (chosen,), count)[0].top)


def scores(logits: Tensor, tokens: Sequence[int], top: int | None) -> list[NextToken]:
    """Given tokens after rows of logits (tokens, vocabulary), with their log-probabilities and `top` top tokens."""
    totals = logits.logsumexp(-1)
    given = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0] - totals
    values, best = logits.topk(min(top or 0, logits.shape[1]))
    pairs = zip(best.tolist(), (values - totals[:, None]).tolist(), strict=True)
    tops = [tuple(zip(names, found, strict=True)) for names, found in pairs]
    return [NextToken(*each) for each in zip(tokens, given.tolist(), tops, strict=True)]
