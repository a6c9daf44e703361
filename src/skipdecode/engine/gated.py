"""The engine's interface over transformers' own forward, gated: for families without a fast path, and as a reference.

Strict waves of left-padded rows on one `SkipCache`. Finished rows leave the batch and the cache. Depth follows the
schedule's positions only. Several times slower than `Engine`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from skipdecode.engine.requests import Request, StepOutput, finish_reason
from skipdecode.engine.sampling import RowSampler, choose, likeliest
from skipdecode.engine.scheduler import RequestSize, Scheduler
from skipdecode.models.attach import Attachment, attach
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = ["GatedEngine"]


class GatedEngine:
    """Decodes requests through a gated transformers model.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        A causal LM of a family in `skipdecode.models.families`, nothing attached. While a `run` goes on, it is gated.
    schedule : Schedule
        Which layers run.
    max_rows : int
        Rows of a wave.

    Raises
    ------
    UnsupportedModelError
        If the family is not in the table.
    ScheduleError
        If the schedule is for another number of layers.
    """

    def __init__(self, model: Any, schedule: Schedule, *, max_rows: int = 8) -> None:
        self._model = unwrap(model)
        schedule.check_fits(len(decoder_layers(self._model)))
        self._schedule = schedule
        self._max_rows = max_rows
        self._takes_positions = "position_ids" in inspect.signature(type(self._model).forward).parameters
        self._numbers = 0
        self._cancelled: set[int] = set()
        self._begin = time.perf_counter()

    def run(self, requests: Iterable[Request]) -> Iterator[StepOutput]:
        """Decode requests; yields every new token as soon as its step ends. Numbers continue from earlier runs."""
        waiting = dict(enumerate(requests, self._numbers))
        self._numbers += len(waiting)
        scheduler = Scheduler(self._max_rows)
        scheduler.submit(RequestSize(r.max_new_tokens, len(r.prompt), i) for i, r in waiting.items())
        with attach(self._model, self._schedule) as attachment:
            while wave := scheduler.admit(0):
                yield from self._wave(attachment, {size.request: waiting.pop(size.request) for size in wave})

    def cancel(self, number: int) -> None:
        """Drop a request of the current `run`; its row leaves the batch when the step ends."""
        self._cancelled.add(number)

    def _wave(self, attachment: Attachment, requests: dict[int, Request]) -> Iterator[StepOutput]:
        device = self._model.device
        numbers = list(requests)
        samplers = [RowSampler(r.sampling, r.prompt) for r in requests.values()]
        texts: list[list[int]] = [[] for _ in numbers]
        width = max(len(r.prompt) for r in requests.values())
        padding = [width - len(r.prompt) for r in requests.values()]
        ids = torch.tensor(
            [[0] * n + list(r.prompt) for n, r in zip(padding, requests.values(), strict=True)], device=device
        )
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        cache = attachment.new_cache(width)
        for position in range(max(r.max_new_tokens for r in requests.values())):
            start = time.perf_counter()
            logits = self._logits(ids, mask, cache)
            tokens, logprobs = choose(logits, samplers)
            tops = likeliest(logits, samplers)
            now = time.perf_counter()
            layers = self._schedule.prompt_layers() if position == 0 else self._schedule.layers(position - 1)
            alive = []
            for row, (number, token, logprob) in enumerate(zip(numbers, tokens, logprobs, strict=True)):
                texts[row].append(token)
                reason = finish_reason(requests[number], texts[row])
                if reason is None:
                    alive.append(row)
                times = now - self._begin, now - start
                yield StepOutput(number, position, token, logprob, len(layers), reason, *times, tops[row])
            alive = [row for row in alive if numbers[row] not in self._cancelled]
            if not alive:
                return
            if len(alive) < len(numbers):
                chosen = torch.tensor(alive, device=device)
                _select_rows(cache, chosen)
                mask = mask[chosen]
                numbers, tokens = [numbers[i] for i in alive], [tokens[i] for i in alive]
                texts, samplers = [texts[i] for i in alive], [samplers[i] for i in alive]
            ids = torch.tensor(tokens, device=device).unsqueeze(1)
            mask = torch.cat((mask, mask.new_ones(len(numbers), 1)), dim=1)

    @torch.no_grad()
    def _logits(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        options = {}
        if self._takes_positions:
            options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self._model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        logits: Tensor = output.logits[:, -1].float()
        return logits


def _select_rows(cache: Any, rows: Tensor) -> None:
    for layer, held in enumerate(cache.layers):
        if cache.tokens_held(layer):
            held.keys, held.values = held.keys[rows], held.values[rows]
