"""The one loop from requests to text: steps of an engine, and the text of each request as its tokens come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from skipdecode.engine.base import Engine
from skipdecode.engine.requests import FinishReason, Request, StepOutput
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


G = TypeVar("G", bound=Generated)


class TextLoop(Generic[G]):
    """Requests that run on an engine; `running` are those that have not ended, by their numbers in the engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.running: dict[int, G] = {}

    def submit(self, new: Iterable[G], schedule: Schedule, *, checked: bool = False) -> None:
        """Queue requests under a schedule; see `Engine.submit`."""
        new = list(new)
        numbers = self.engine.submit([generated.request for generated in new], schedule, checked=checked)
        for generated, number in zip(new, numbers, strict=True):
            generated.number = number
            self.running[number] = generated

    def step(self) -> Iterator[tuple[G, StepOutput]]:
        """Run a step of the engine; yields its new tokens, each of which goes to `take`."""
        for out in self.engine.step():
            if out.request in self.running:  # else a stop string has ended the text in the same step
                yield self.running[out.request], out

    def take(self, request: G, out: StepOutput) -> list[Piece]:
        """Add a token to its request; returns the pieces of text that are certain now."""
        pieces = request.reader.push(out)
        request.tokens.append(out.token)
        request.text += "".join(piece.text for piece in pieces)
        request.finish_reason = "stop" if request.reader.stopped else out.finish_reason
        if out.finish_reason is not None:
            del self.running[request.number]
        elif request.finish_reason is not None:
            self.remove(request)
        return pieces

    def advance(self) -> list[G]:
        """Run a step of the engine; returns the requests that ended with it."""
        ended = []
        for request, out in self.step():
            self.take(request, out)
            if request.finish_reason is not None:
                ended.append(request)
        return ended

    def cut(self) -> list[G]:
        """End all requests that run, as at their most tokens; returns them."""
        running = list(self.running.values())
        for request in running:
            self.remove(request)
            request.finish_reason = "length"
        return running

    def remove(self, request: G) -> None:
        """End a request that runs, before the next step."""
        del self.running[request.number]
        self.engine.cancel(request.number)
