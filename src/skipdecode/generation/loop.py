"""The one loop from requests to text: steps of an engine, and the text of each request as its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from skipdecode.engine.base import Engine
from skipdecode.engine.requests import FinishReason, Request, StepOutput
from skipdecode.errors import UsageError
from skipdecode.generation.detokenizer import Detokenizer, Piece
from skipdecode.schedule import Schedule


@dataclass(eq=False)
class Generated:
    """A request, its fresh reader, and what was generated for it so far.

    `number` is that of the request in its engine, -1 before `TextLoop.submit`. `text` is the text that is certain.
    `finish_reason` is None while the request runs.
    """

    request: Request
    reader: Detokenizer
    number: int = field(default=-1, init=False)
    tokens: list[int] = field(default_factory=list, init=False)
    text: str = field(default="", init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    def take(self, out: StepOutput) -> list[Piece]:
        """Add a token; returns the pieces of text that are certain now."""
        pieces = self.reader.push(out)
        self.tokens.append(out.token)
        self.text += "".join(piece.text for piece in pieces)
        self.finish_reason = "stop" if self.reader.stopped else out.finish_reason
        return pieces


G = TypeVar("G", bound=Generated)


class TextLoop(Generic[G]):
    """Requests that run on an engine.

    Attributes
    ----------
    engine : Engine
    running : dict of int to Generated
        Requests that have not ended, by their numbers in the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: dict[int, G] = {}

    def submit(self, new: Iterable[G], schedule: Schedule | None = None) -> None:
        """Queue requests under a schedule, by default the engine's; raises as `Engine.submit`."""
        new = list(new)
        for number, each in zip(self.engine.submit([each.request for each in new], schedule), new, strict=True):
            each.number = number
            self.running[number] = each

    def step(self) -> Iterator[tuple[G, StepOutput]]:
        """A step of the engine: its new tokens, each of which goes to `take`."""
        for out in self.engine.step():
            if out.request in self.running:  # else a stop string has ended the text in the same step
                yield self.running[out.request], out

    def take(self, one: G, out: StepOutput) -> list[Piece]:
        """Add a token to its request; returns the pieces of text that are certain now."""
        pieces = one.take(out)
        if out.finish_reason is not None:
            del self.running[one.number]
        elif one.finish_reason is not None:
            self.remove(one)
        return pieces

    def ended(self) -> list[G]:
        """A step of the engine; returns the requests that ended with it."""
        found = []
        for one, out in self.step():
            self.take(one, out)
            if one.finish_reason is not None:
                found.append(one)
        return found

    def cut(self) -> list[G]:
        """End all requests that run, as at their most tokens; returns them."""
        running = list(self.running.values())
        for one in running:
            self.remove(one)
            one.finish_reason = "length"
        return running

    def remove(self, one: G) -> None:
        """End a request that runs, before the next step."""
        del self.running[one.number]
        self.engine.cancel(one.number)


class TextStream(Iterator[str]):
    """The text of one request, in pieces; no one else uses the engine until the stream has ended.

    `loop` has no requests yet; its engine is closed if a step raises. `finished` makes the statistics at the end, from
    when on others may use the engine. `turn` is held during each step, and while the stream is closed.

    Attributes
    ----------
    text, tokens : str, list of int
        The text and tokens so far.
    finish_reason, stats : {"eos", "length", "stop"} or None, RunStats or None
        None before the end; of a stream that was closed before it, `finish_reason` stays None.
    """

    _open = False

    def __init__(
        self,
        loop: TextLoop[Generated],
        one: Generated,
        schedule: Schedule,
        finished: Callable[[], Any],
        turn: AbstractContextManager[object],
    ) -> None:
        self.stats: Any = None
        self._loop, self._one, self._finished, self._turn = loop, one, finished, turn
        loop.submit([one], schedule)
        self._open = True

    @property
    def text(self) -> str:
        return self._one.text

    @property
    def tokens(self) -> list[int]:
        return self._one.tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._one.finish_reason

    def __next__(self) -> str:
        while self._open:
            with self._turn:
                before = len(self.text)
                try:
                    self._loop.ended()
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
                    self._loop.remove(self._one)
                self.stats = self._finished()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("a stream is not copied or pickled: begin another with LLM.stream")

    def __del__(self) -> None:
        self.close()
