"""How much of a stage of `prepare` fits into a time: the speed of the model on the records, and sizes that follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

import torch

from skipdecode.common.types import PreTrainedModel
from skipdecode.data.batches import batches_of
from skipdecode.data.examples import Example
from skipdecode.learning.settings import SHORT, WHOLE, EvaluationSize, SearchSize
from skipdecode.learning.tune import in_hardware_type
from skipdecode.models.forward import response_logits

TYPICAL = Example("", *2 * (tuple(1 + i % 8 for i in range(96)),))  # before there are texts
_PRODUCTS = 1.3  # of the time of a fit's forward passes, with the products of its states
_TIMED = 2  # records
_LEAST_TEXTS = 16  # of an evaluation that says something
_DEV_SHARE = 0.01  # of the minutes: a pass over the dev records
_STEP = 3  # times as long as a forward
_LEAST_RECORDS, _MOST_RECORDS = 8, 64
_TOKENS_A_COLUMN = 8  # of a fit, for each column of the states: fewer are taken only where nothing else is left to save
_MOST_A_COLUMN = 28  # tokens of a fit: twice as many lower the KL by 3% (docs/LOG.md)
_SEARCHES = (SearchSize(8, 4), SearchSize(8, 2), SearchSize(4, 2))


@dataclass(frozen=True)
class Pace:
    """Tokens per second of a model's forward at full depth, and the lengths of a sample of the records in tokens.

    `text_tokens` is the mean of a prompt with its response, `prompt_tokens` that of a prompt alone.
    """

    label: ClassVar = "pace"
    tokens_per_second: float
    text_tokens: float
    prompt_tokens: float
    longest_response: int

    @classmethod
    def of(cls, model: PreTrainedModel, examples: Sequence[Example]) -> Pace:
        """Measure two forwards on a few records, of which the second counts, in the type that learning takes."""
        model = in_hardware_type(model)
        (batch,) = batches_of(examples[:_TIMED], _TIMED)
        batch, took = batch.to(model.device), 0.0
        with torch.inference_mode():
            for _ in range(2):
                start = time.perf_counter()
                response_logits(model, batch, attached=False)
                if model.device.type == "cuda":
                    torch.cuda.synchronize()
                took = time.perf_counter() - start
        prompts, responses = [len(e.prompt) for e in examples], [len(e.response) for e in examples]
        return cls(batch.tokens / took, fmean(prompts) + fmean(responses), fmean(prompts), max(responses))

    def enough(self, width: int) -> float:
        """Return about the minutes of which half are left to tune where all other stages are at their least."""
        search = _PRODUCTS * (4 * _TOKENS_A_COLUMN * width + 8 * _LEAST_RECORDS * self.text_tokens)
        evaluation = 4 * _LEAST_TEXTS * self.text_tokens * 2  # four methods; generated, timed and read
        return 2 * (24 * self.text_tokens + search + 2 * evaluation) / self.tokens_per_second / 60

    def search(self, seconds: float, width: int, groups: Sequence[int]) -> SearchSize:
        """Return the most thorough search that takes about so many seconds, or the least one.

        `width` is hidden_size. `groups`: numbers of schedules to try that share a fit.
        """
        size, tokens, candidates = _SEARCHES[-1], 0.0, sum(groups)
        for size in _SEARCHES:
            measured = size.records * self.text_tokens * (1 + candidates)
            # Sets of the lowest layers share full depth's states.
            passes = _PRODUCTS * (len(groups) * (1 + 0.3 * size.fit_depths) + 0.05 * candidates)
            tokens = (seconds * self.tokens_per_second - measured) / passes
            if tokens >= _TOKENS_A_COLUMN * width:
                break
        return replace(size, fit_tokens=max(1, min(_MOST_A_COLUMN * width, round(tokens))))

    def evaluation(self, seconds: float, a_batch: float, batch: int, speedups: Sequence[float]) -> EvaluationSize:
        """Return the size of an evaluation that is to take about so many seconds: WHOLE if that fits.

        `a_batch`: seconds of a batch of requests at full depth. `speedups`: those of full depth and of the schedules,
        each of which runs with W8A8 weights too, in about half of the time.
        """
        runs = -(-WHOLE.records // batch) + WHOLE.speed_rounds * WHOLE.speed_batches
        took = 1.5 * sum(a_batch / speedup for speedup in speedups) * runs
        return WHOLE if took <= seconds else SHORT

    def steps(self, seconds: float, batch: int) -> int:
        """Return about the number of training steps at full depth in so many seconds, 1 at least."""
        return max(1, round(seconds * self.tokens_per_second / (_STEP * batch * self.text_tokens)))

    def dev_records(self, seconds: float) -> int:
        """Return the number of dev records whose loss takes a small part of so many seconds."""
        affordable = _DEV_SHARE * seconds * self.tokens_per_second / self.text_tokens
        return min(_MOST_RECORDS, max(_LEAST_RECORDS, int(affordable)))
