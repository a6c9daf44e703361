"""transformers' own `generate` behind the engine's interface: the yardstick, and the methods that live inside it.

One batch a step, from its prompts to its last token. Rows that have ended are decoded on to the end of the longest, as
`generate` does. Greedy only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from skipdecode.engine.base import Engine, EngineStats
from skipdecode.engine.gated import left_pad
from skipdecode.engine.requests import FinishReason, Request, StepOutput
from skipdecode.errors import ScheduleError, UsageError
from skipdecode.models.families import decoder_layers, unwrap
from skipdecode.schedule import Schedule

__all__ = ["GenerateEngine", "TokenClock"]


class TokenClock:
    """A stopping criterion that never stops, and notes the time after every token."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.times: list[float] = []
        self.lengths: list[int] = []

    def now(self) -> float:
        """The time once the device has done its work."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(self.now())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class GenerateEngine(Engine):
    """`generate` of an untouched model at full depth, or of a model that `around` has changed.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
        In eval mode, nothing attached; left as it was.
    max_rows : int
        Rows of a batch.
    options : mapping, optional
        Further arguments of `generate`.
    around : callable, optional
        Given the end tokens of a batch, a context that holds while it is generated; what entering it gives has
        ``layers_of(rows, prompt_tokens)``: the layers that the fed tokens of a finished batch ran, summed.
    """

    name = "generate"

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int = 8,
        options: Mapping[str, Any] | None = None,
        around: Callable[[frozenset[int]], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self._model = model
        self.num_layers = len(decoder_layers(unwrap(model)))
        self.schedule = Schedule.full(self.num_layers)
        self.stats = EngineStats()
        self._max_rows, self._options, self._around = max_rows, dict(options or {}), around
        self._queue: deque[tuple[int, Request]] = deque()
        self._submitted = 0
        self._begin = time.perf_counter()

    def submit(self, requests: Iterable[Request], schedule: Schedule | None = None) -> list[int]:
        """See `Engine`; greedy requests at full depth only."""
        if schedule is not None and not schedule.is_full:
            raise ScheduleError(f"{self.name} runs at full depth only, not under {schedule.name!r}")
        new = list(enumerate(requests, self._submitted))
        if any(not request.sampling.is_plain_greedy for _, request in new):
            raise UsageError(f"{self.name} decodes greedily only: leave sampling and penalties out")
        self._submitted += len(new)
        self._queue.extend(new)
        return [number for number, _ in new]

    @property
    def waiting(self) -> int:
        """See `Engine`."""
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
        self._queue = deque(entry for entry in self._queue if entry[0] != number)

    def close(self) -> None:
        """See `Engine`."""
        self._queue.clear()

    def step(self) -> list[StepOutput]:
        """One whole batch: every token of every row, in the order of their positions."""
        if not self._queue:
            return []
        batch = [self._queue.popleft()]
        ends = batch[0][1].stop_ids
        while self._queue and len(batch) < self._max_rows and self._queue[0][1].stop_ids == ends:
            batch.append(self._queue.popleft())
        start = time.perf_counter()
        rows, first = self._generate([request for _, request in batch], ends)
        end = time.perf_counter()
        self.stats.seconds += end - start
        self.stats.prompt_seconds += first - start
        self.stats.decode_seconds += end - first
        outputs = []
        for (number, request), row in zip(batch, rows, strict=True):
            for position, token in enumerate(row):
                reason: FinishReason | None = None
                if position == len(row) - 1:
                    reason = "eos" if token in request.stop_ids else "length"
                times = end - self._begin, end - start
                outputs.append(StepOutput(number, position, token, float("nan"), self.num_layers, reason, *times))
        return sorted(outputs, key=lambda out: out.position)

    def _generate(self, requests: list[Request], ends: frozenset[int]) -> tuple[list[list[int]], float]:
        """New tokens of each row up to its end, and when the first of them were there."""
        pad = min(ends, default=0)
        ids, mask = left_pad([request.prompt for request in requests], pad, self._model.device)
        clock = TokenClock(self._model.device)
        around = nullcontext() if self._around is None else self._around(ends)
        with torch.inference_mode(), around as session:
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
            clock.now()
        new = output[:, ids.shape[1] :].tolist()
        rows = [_until_end(row[: request.max_new_tokens], ends) for row, request in zip(new, requests, strict=True)]
        self._count(requests, rows, ids.numel(), session)
        return rows, clock.times[0]

    def _count(self, requests: list[Request], rows: list[list[int]], fed: int, session: Any) -> None:
        stats = self.stats
        again = sum(len(row) - 1 for row in rows)
        steps = max(map(len, rows)) - 1
        stats.steps += steps
        stats.prompt_tokens += sum(len(request.prompt) for request in requests)
        stats.new_tokens += sum(map(len, rows))
        stats.fed_tokens += again
        stats.layer_reads += steps * self.num_layers
        stats.token_layers += again * self.num_layers if session is None else session.layers_of(rows, fed)


def _until_end(row: list[int], ends: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: end + 1]
