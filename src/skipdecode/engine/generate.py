"""transformers' own `generate` as an engine: for comparison, and for methods that are options of `generate`.

A step decodes one whole batch. Finished sequences are decoded on to the end of the longest one, as in `generate`.
Greedy only.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from skipdecode.engine.base import Engine
from skipdecode.engine.gated import left_pad
from skipdecode.engine.requests import Request, StepOutput
from skipdecode.engine.sequence import Sequence
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

TimedToken = tuple[int, float]
"""A new token of a sequence, and the reading of `time.perf_counter` at its end."""
Around = Callable[[frozenset[int]], AbstractContextManager[Any]]
"""From the end tokens of a batch to a context that holds while the batch is generated; see `GenerateEngine`."""


def no_context(ends: frozenset[int]) -> AbstractContextManager[Any]:
    """The context of an untouched model."""
    return nullcontext()


class TokenClock:
    """A stopping criterion that never stops; it records the time after every token."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        # Drafting methods add several tokens at once.
        self._times += [time.perf_counter()] * (input_ids.shape[1] - len(self._times))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def times(self, prompt_tokens: int) -> list[float]:
        """The time of each token after the prompt."""
        return self._times[prompt_tokens:]


class BatchEngine(Engine):
    """Base of engines that decode a whole batch at a time, greedily and at full depth.

    Parameters
    ----------
    num_layers : int
        Decoder layers of the model.
    max_rows : int
        Rows of a batch.
    """

    def __init__(self, num_layers: int, max_rows: int) -> None:
        super().__init__(Schedule.full(num_layers))
        self._max_rows = max_rows
        self._queue: deque[Sequence] = deque()

    @abstractmethod
    def _generate(self, requests: list[Request]) -> list[list[TimedToken]]:
        """New tokens of each sequence up to its end; all sequences have the same end tokens."""

    def _enqueue(self, schedule: Schedule, new: list[Sequence]) -> None:
        if not schedule.is_full:
            raise ScheduleError(f"{self.name} runs at full depth only, not under {schedule.name!r}")
        if any(not sequence.request.sampling.is_plain_greedy for sequence in new):
            raise UsageError(f"{self.name} decodes greedily only: leave sampling and penalties out")
        self._queue.extend(new)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def rows(self) -> int:
        """See `Engine`: none between two batches."""
        return 0

    @property
    def kv_bytes(self) -> int:
        """See `Engine`: none between two batches."""
        return 0

    def takes(self, schedule: Schedule) -> bool:
        """See `Engine`: full depth."""
        return super().takes(schedule) and schedule.is_full

    def cancel(self, number: int) -> None:
        """See `Engine`; a batch under way goes on to its end."""
        self._queue = deque(sequence for sequence in self._queue if sequence.number != number)

    def close(self) -> None:
        self._queue.clear()

    def step(self) -> list[StepOutput]:
        """One whole batch: every token of every row, in the order of their positions."""
        if not self._queue:
            return []
        batch = [self._queue.popleft()]
        ends = batch[0].request.stop_ids
        while self._queue and len(batch) < self._max_rows and self._queue[0].request.stop_ids == ends:
            batch.append(self._queue.popleft())
        start = time.perf_counter()
        rows = self._generate([sequence.request for sequence in batch])
        end, first = time.perf_counter(), min(row[0][1] for row in rows)
        stats, lengths = self.stats, [len(row) for row in rows]
        stats.seconds += end - start
        stats.prompt_seconds += first - start
        stats.steps += max(lengths) - 1
        stats.prompt_tokens += sum(len(sequence.request.prompt) for sequence in batch)
        stats.new_tokens += sum(lengths)
        stats.fed_tokens += sum(lengths) - len(rows)
        stats.layer_reads += (max(lengths) - 1) * self.num_layers
        outputs = []
        for sequence, row in zip(batch, rows, strict=True):
            before = start
            for position, (token, at) in enumerate(row):
                sequence.append(token)
                told = sequence.number, position, token, math.nan, self.num_layers, sequence.finish_reason
                outputs.append(StepOutput(*told, at - self.began, at - before))
                before = at
        return sorted(outputs, key=lambda out: out.position)


class GenerateEngine(BatchEngine):
    """`generate` of a model at full depth, or of a model that `around` changes.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        In eval mode, with nothing attached; it is not changed.
    max_rows : int
        Rows of a batch.
    options : mapping, optional
        Further arguments of `generate`.
    around : callable, optional
        Takes the end tokens of a batch and returns a context for its generation. The object of the context has
        ``layers_of(rows, prompt_tokens)``: the sum of the layers that the fed tokens of a finished batch ran.
    """

    name = "generate"

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 8,
        options: Mapping[str, Any] | None = None,
        around: Around = no_context,
    ) -> None:
        super().__init__(len(decoder_layers(unwrap(model))), max_rows)
        self._model, self._options, self._around = model, dict(options or {}), around

    def _generate(self, requests: list[Request]) -> list[list[TimedToken]]:
        ends = requests[0].stop_ids
        pad = min(ends, default=0)
        ids, mask = left_pad([request.prompt for request in requests], pad, self._model.device)
        clock = TokenClock(self._model.device)
        with torch.inference_mode(), self._around(ends) as session:
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(request.max_new_tokens for request in requests),
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                eos_token_id=sorted(ends) or None,
                pad_token_id=pad,
                stopping_criteria=StoppingCriteriaList([clock]),
                **self._options,
            )
            clock(output, None)  # the tokens after the last call, if any
        new, times = output[:, ids.shape[1] :].tolist(), clock.times(ids.shape[1])
        rows = [_until_end(row[: request.max_new_tokens], ends) for row, request in zip(new, requests, strict=True)]
        again = sum(len(row) - 1 for row in rows)
        layers = again * self.num_layers if session is None else session.layers_of(rows, ids.numel())
        self.stats.token_layers += layers
        return [list(zip(row, times[: len(row)], strict=True)) for row in rows]


def _until_end(row: list[int], ends: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: end + 1]
