"""Chooses next tokens from logits. Each sequence has its own settings, history and random numbers.

The choice of a sequence depends on its logits and its own generator only, not on the other sequences of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from skipdecode.engine.kernels.head import Candidates
from skipdecode.engine.kernels.native import greedy
from skipdecode.engine.requests import NextToken, Request, Sampling

_MOST_TOP = 128  # largest top-k for which candidates are sought
_LEAST = -1e30  # of a forbidden token: finite, also after the division by a temperature, as all may be forbidden
_TRIED = 8  # top tokens of a greedy row that are tried before all that a grammar allows
_NEAR = 512, 8192  # top tokens among which a nucleus is sought first: to sort a whole vocabulary takes milliseconds


class Sampler:
    """One sequence's settings and state.

    Rules see prompt and output, as in transformers; frequency and presence penalty see the output alone, as at OpenAI.

    Attributes `top`: the number of top tokens whose logits are enough for most choices: 1 if greedy, a few if rules or
    a grammar may lower or forbid some, k for top-k; 0: all tokens. `failed`: whether the grammar allows no token, or
    takes too much work.
    """

    def __init__(self, sampling: Sampling, prompt: tuple[int, ...], most: int = 0, ends: Collection[int] = ()) -> None:
        self.sampling, self.failed = sampling, False
        self._grammar = None if sampling.grammar is None else sampling.grammar.deep_copy()
        self.is_plain_greedy, self._changes = sampling.is_plain_greedy, sampling.changes_logits
        self._rules = sampling.processors(prompt, most, ends)
        self._text = torch.tensor([prompt if self._rules else ()], dtype=torch.int64)  # prompt and output, for rules
        self._output: Counter[int] | None = None
        if sampling.frequency_penalty or sampling.presence_penalty:
            self._output = Counter()
        self.top = self._top()
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
        """Make the sampler of a new sequence."""
        return cls(request.sampling, request.prompt, request.max_new_tokens, request.stop_ids)

    def accepts(self, token: int) -> bool:
        """Whether the top token may be the next one; if so, it is."""
        if self._grammar is not None and not self._grammar.compute_bitmask()[token >> 3] >> (token & 7) & 1:
            return False
        self._append(token)
        return True

    def forced_tokens(self) -> list[int]:
        """The next tokens of which the grammar allows no others; drafts, because `pick` takes them all the same."""
        return [] if self._grammar is None or self.failed else list(self._grammar.compute_ff_tokens())

    def pick(self, logits: Tensor) -> int:
        """The next token from logits (vocabulary,), fp32 on the CPU; the logits are not changed."""
        logits = self._changed(logits)
        allowed = self._allowed(len(logits))
        if allowed is not None:
            logits = logits[allowed]
        token = int(logits.argmax()) if self._generator is None else self._draw(logits, self._generator)
        token = token if allowed is None else int(allowed[token])
        self._append(token)
        return token

    def pick_among(self, candidates: Candidates, row: int) -> int | None:
        """The next token, if the candidates of a row decide it; else None, and nothing has changed."""
        count = candidates.counts[row]
        token_ids, logits = candidates.token_ids[row, :count], candidates.logits[row, :count]
        if self._generator is not None:
            return int(token_ids[self.pick(logits)])
        best, order = logits.sort(descending=True, stable=True)
        least = best[min(self.top, count) - 1]
        if self.is_plain_greedy:
            return next((token for token in token_ids[order[best >= least]].tolist() if self.accepts(token)), None)
        # No logit rises, so a token that is no candidate stays below the least of the top ones.
        changed = self._changed(torch.full((candidates.size,), -math.inf).index_copy_(0, token_ids, logits))
        token = int(changed.argmax())
        if changed[token] < least:
            return None
        self._append(token)
        return token

    def _top(self) -> int:
        s = self.sampling
        if s.top_logprobs is not None:
            return 0
        if self.is_plain_greedy:
            return 1 if self._grammar is None else _TRIED
        if s.is_greedy:
            return _TRIED if s.only_lower and not s.logit_bias and self._grammar is None else 0
        free = self._grammar is None and not s.active and not s.logit_bias
        return s.top_k if free and s.top_k <= _MOST_TOP else 0

    def _allowed(self, size: int) -> Tensor | None:
        """Find the tokens that the grammar allows, ascending; None: all, also if it allows none, as it fails then."""
        if self._grammar is None:
            return None
        bits = np.frombuffer(self._grammar.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little"))
        return torch.from_numpy(allowed) if len(allowed) else None

    def _append(self, token: int) -> None:
        """Note a new token. A grammar that can go no further allows end tokens alone."""
        if self._rules:
            self._text = torch.cat((self._text, self._text.new_tensor([[token]])), dim=1)
        if self._output is not None:
            self._output[token] += 1
        if self._grammar is not None:
            self._grammar.consume_token(token)
            self.failed = self._grammar.is_error()

    def _changed(self, logits: Tensor) -> Tensor:
        """The logits under bias, rules and penalties; a copy if there are any."""
        if not self._changes:
            return logits
        logits = logits.clone()
        if self._bias is not None:
            logits.index_add_(0, *self._bias)
        for rule in self._rules:
            logits = rule(self._text, logits[None])[0]
        if self._output is not None:
            new = torch.tensor(list(self._output), dtype=torch.int64)
            times = torch.tensor(list(self._output.values()), dtype=torch.float32)
            logits[new] -= self.sampling.frequency_penalty * times + self.sampling.presence_penalty
        return logits.clamp_(min=_LEAST)

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
        sums = probs.cumsum(0)  # torch.multinomial draws a number for each token: 20 times as long
        index = int(torch.searchsorted(sums, sums[-1:] * (1 - torch.rand(1, generator=generator)).to(sums.device)))
        return index if tokens is None else int(tokens[index])


def _nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Logits and positions of the fewest most probable tokens that reach `top_p` together, the best first."""
    near, total = torch.arange(len(logits)), logits.logsumexp(0)
    for size in _NEAR:
        if len(logits) <= size:
            break
        top = logits.topk(size).values
        if (top - total).exp().sum() >= top_p:
            near = (logits >= top[-1]).nonzero()[:, 0]
            break
    best, order = logits[near].sort(descending=True, stable=True)
    probs = (best - total).exp()
    reached = probs.cumsum(0)
    # A token stays if those before it do not reach p yet. The first stays even if p is 0 in fp32.
    count = max(1, int((reached - probs < top_p).sum()))
    return best[:count], near[order[:count]]


class Predictions:
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
        logits = self._logits
        if sampler.is_plain_greedy and sampler.accepts(self._greedy[0][row]):
            chosen, logprob = self._greedy[0][row], self._greedy[1][row]
        elif isinstance(logits, Candidates) and (best := sampler.pick_among(logits, row)) is not None:
            return NextToken(best)
        else:
            values = logits.full(row) if isinstance(logits, Candidates) else self._local[row]
            chosen = sampler.pick(values)
            logprob = float(values[chosen] - values.logsumexp(-1))
        count = sampler.sampling.top_logprobs
        if not count or isinstance(logits, Candidates):
            return NextToken(chosen, logprob)
        return NextToken(chosen, logprob, scores(logits[row : row + 1], (chosen,), count)[0].top)


def scores(logits: Tensor, tokens: Sequence[int], top: int | None) -> list[NextToken]:
    """Score tokens after rows of logits (tokens, vocabulary): their log-probabilities, and `top` top tokens."""
    totals = logits.logsumexp(-1)
    logprobs = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0] - totals
    values, best = logits.topk(min(top or 0, logits.shape[1]))
    pairs = zip(best.tolist(), (values - totals[:, None]).tolist(), strict=True)
    tops = [tuple(zip(top_tokens, top_logprobs, strict=True)) for top_tokens, top_logprobs in pairs]
    return [NextToken(*score) for score in zip(tokens, logprobs.tolist(), tops, strict=True)]
