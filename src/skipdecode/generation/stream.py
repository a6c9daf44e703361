"""The text of one request as a stream of pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from skipdecode.engine.requests import FinishReason
from skipdecode.errors import UsageError
from skipdecode.generation.loop import Generated, TextLoop
from skipdecode.generation.stats import RunStats


class TextStream(Iterator[str]):
    """The text of one request, in pieces; no one else uses the engine until the stream has ended.

    `loop` runs the request and no other; its engine is closed if a step raises. `finished` makes the statistics at the
    end, from when on others may use the engine. `turn` is held during each step, and while the stream is closed.

    Attributes `text`, `tokens`: those so far. `finish_reason`, `stats`: None before the end.
    """

    def __init__(
        self,
        loop: TextLoop[Generated],
        request: Generated,
        finished: Callable[[], RunStats],
        turn: AbstractContextManager[object],
    ) -> None:
        self.stats: RunStats | None = None
        self._loop, self._request, self._finished, self._turn = loop, request, finished, turn
        self._open = True

    @property
    def text(self) -> str:
        return self._request.text

    @property
    def tokens(self) -> list[int]:
        return self._request.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._request.finish_reason

    def __next__(self) -> str:
        while self._open:
            with self._turn:
                before = len(self.text)
                try:
                    self._loop.advance()
                except BaseException:
                    self._open = False
                    self._loop.engine.close()
                    raise
                if self.finish_reason is not None:
                    self.close()
            if piece := self.text[before:]:
                return piece
        raise StopIteration

    def close(self) -> None:
        """End the stream now, if it has not ended."""
        if not self._open:
            return
        with self._turn:
            if self._open:
                self._open = False
                if self._loop.running:
                    self._loop.remove(self._request)
                self.stats = self._finished()

    def __reduce_ex__(self, protocol: object) -> str:
        raise UsageError("a stream is not copied or pickled: begin another with LLM.stream")

    def __del__(self) -> None:
        self.close()
