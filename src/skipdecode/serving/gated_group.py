"""The lane of models without a fast path: waves through transformers, one schedule at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.requests import Request, StepOutput
from skipdecode.schedule import Schedule
from skipdecode.serving.groups import KvSize

__all__ = ["GatedLane"]

T = TypeVar("T")


class _Waiting(NamedTuple, Generic[T]):
    row: T
    request: Request
    schedule: Schedule


class GatedLane(Generic[T]):
    """A lane on `skipdecode.engine.GatedEngine`. Rows that come while a wave runs wait for its end.

    Parameters
    ----------
    model : PreTrainedModel or PeftModel
    max_rows : int
        Rows of a wave.
    kv_size : KvSize
    """

    def __init__(self, model: Any, max_rows: int, kv_size: KvSize) -> None:
        self._model = model
        self._max_rows = max_rows
        self._kv_size = kv_size
        self._waiting: deque[_Waiting[T]] = deque()
        self._wave: dict[int, T] = {}
        self._tokens: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._engine: GatedEngine | None = None
        self._outputs: Iterator[StepOutput] = iter(())

    @property
    def rows(self) -> int:
        """See `Lane`."""
        return len(self._waiting) + len(self._wave)

    @property
    def kv_bytes(self) -> int:
        """See `Lane`."""
        return sum(self._held.values())

    def takes(self, schedule: Schedule) -> bool:
        """See `Lane`: any schedule."""
        return True

    def submit(self, row: T, request: Request, schedule: Schedule) -> None:
        """See `Lane`."""
        self._waiting.append(_Waiting(row, request, schedule))

    def cancel(self, row: T) -> None:
        """See `Lane`."""
        self._waiting = deque(w for w in self._waiting if w.row is not row)
        for number in [n for n, r in self._wave.items() if r is row]:
            if self._engine is not None:
                self._engine.cancel(number)
            self._leave(number)
        if not self._wave:
            self._end_wave()

    def step(self) -> list[tuple[T, StepOutput]]:
        """See `Lane`."""
        if not self._wave:
            self._begin_wave()
        outputs = []
        # A step yields one output for each row that is left.
        for _ in range(len(self._wave)):
            out = next(self._outputs)
            outputs.append((self._wave[out.request], out))
            self._held[out.request] = self._kv_size.of(self._tokens[out.request] + out.position, out.layers)
        for _, out in outputs:
            if out.finish_reason is not None:
                self._leave(out.request)
        if not self._wave:
            self._end_wave()
        return outputs

    def reset(self) -> list[T]:
        """See `Lane`."""
        rows = [w.row for w in self._waiting] + list(self._wave.values())
        self._waiting.clear()
        for number in list(self._wave):
            self._leave(number)
        self._end_wave()
        return rows

    def _begin_wave(self) -> None:
        if not self._waiting:
            return
        schedule = self._waiting[0].schedule
        chosen = [w for w in self._waiting if w.schedule == schedule][: self._max_rows]
        for waiting in chosen:
            self._waiting.remove(waiting)
        self._wave = {number: waiting.row for number, waiting in enumerate(chosen)}
        self._tokens = {number: len(waiting.request.prompt) for number, waiting in enumerate(chosen)}
        self._engine = GatedEngine(self._model, schedule, max_rows=len(chosen))
        self._outputs = self._engine.run([waiting.request for waiting in chosen])

    def _end_wave(self) -> None:
        # Closing the generator takes the gates off the model.
        getattr(self._outputs, "close", lambda: None)()
        self._engine, self._outputs = None, iter(())

    def _leave(self, number: int) -> None:
        del self._wave[number]
        self._held.pop(number, None)
