"""The group of models without a fast path: waves through transformers, one schedule at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from skipdecode.engine.gated import GatedEngine
from skipdecode.engine.requests import StepOutput
from skipdecode.schedule import Schedule
from skipdecode.serving.groups import KvSize
from skipdecode.serving.request_state import Choice

__all__ = ["GatedGroup"]


class GatedGroup:
    """A group on `skipdecode.engine.GatedEngine`. Rows that come while a wave runs wait for its end.

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
        self._waiting: deque[Choice] = deque()
        self._wave: dict[int, Choice] = {}
        self._tokens: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._engine: GatedEngine | None = None
        self._outputs: Iterator[StepOutput] = iter(())

    @property
    def rows(self) -> int:
        """See `Group`."""
        return len(self._waiting) + len(self._wave)

    @property
    def kv_bytes(self) -> int:
        """See `Group`."""
        return sum(self._held.values())

    def takes(self, schedule: Schedule) -> bool:
        """See `Group`: any schedule."""
        return True

    def submit(self, choice: Choice) -> None:
        """See `Group`."""
        self._waiting.append(choice)

    def cancel(self, choice: Choice) -> None:
        """See `Group`."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting is not choice)
        for number in [number for number, row in self._wave.items() if row is choice]:
            if self._engine is not None:
                self._engine.cancel(number)
            self._leave(number)
        if not self._wave:
            self._end_wave()

    def step(self) -> list[tuple[Choice, StepOutput]]:
        """See `Group`."""
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

    def reset(self) -> list[Choice]:
        """See `Group`."""
        rows = [*self._waiting, *self._wave.values()]
        self._waiting.clear()
        for number in list(self._wave):
            self._leave(number)
        self._end_wave()
        return rows

    def _begin_wave(self) -> None:
        if not self._waiting:
            return
        schedule = self._waiting[0].state.schedule.schedule
        chosen = [choice for choice in self._waiting if choice.state.schedule.schedule == schedule][: self._max_rows]
        for choice in chosen:
            self._waiting.remove(choice)
        self._wave = dict(enumerate(chosen))
        self._tokens = {number: len(choice.request.prompt) for number, choice in enumerate(chosen)}
        self._engine = GatedEngine(self._model, schedule, max_rows=len(chosen))
        self._outputs = self._engine.run([choice.request for choice in chosen])

    def _end_wave(self) -> None:
        # Closing the generator takes the gates off the model.
        getattr(self._outputs, "close", lambda: None)()
        self._engine, self._outputs = None, iter(())

    def _leave(self, number: int) -> None:
        del self._wave[number]
        self._held.pop(number, None)
