"""Text of one row while its tokens come in: whole characters, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from skipdecode.data.stopping import find_stop, held_back
from skipdecode.data.summary import RunSummary
from skipdecode.engine.base import Engine
from skipdecode.engine.requests import FinishReason, Request, StepOutput
from skipdecode.schedule import Schedule

__all__ = ["Detokenizer", "Piece", "TextStream"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Piece(NamedTuple):
    """A token and the text that it adds."""

    output: StepOutput
    text: str


class Detokenizer:
    """Turns a choice's tokens into text.

    Parameters
    ----------
    stops : tuple of str
        The text ends before the first of them; none is empty.

    Attributes
    ----------
    stopped : bool
        Whether a stop string was found; nothing may be pushed after that.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...] = ()) -> None:
        self._decoder = _Decoder(tokenizer)
        self._stops = stops
        self._pending: deque[Piece] = deque()
        self._tail = ""  # text of the pending pieces
        self.stopped = False

    def push(self, output: StepOutput) -> list[Piece]:
        """Take the next token; returns those whose text is decided now. Of the last token all that is held back."""
        text = self._decoder.push(output.token)
        last = output.finish_reason is not None
        if last:
            text += self._decoder.rest()
        self._pending.append(Piece(output, text))
        self._tail += text
        found = find_stop(self._tail, self._stops)
        if found is not None:
            self.stopped = True
            return self._cut(found)
        return self._release(0 if last else held_back(self._tail, self._stops))

    def _release(self, held: int) -> list[Piece]:
        free = len(self._tail) - held
        pieces = []
        while self._pending and len(self._pending[0].text) <= free:
            free -= len(self._pending[0].text)
            pieces.append(self._pending.popleft())
        self._tail = "".join(piece.text for piece in self._pending)
        return pieces

    def _cut(self, length: int) -> list[Piece]:
        pieces = []
        for output, text in self._pending:
            pieces.append(Piece(output, text[:length]))
            length -= len(pieces[-1].text)
        return pieces


class TextStream(Iterator[str]):
    """The text of one request, in pieces as they come; the engine is the stream's alone until it has ended.

    Parameters
    ----------
    engine : Engine
        Idle.
    schedule : Schedule
        Of the request.
    reader : Detokenizer
        Fresh.
    summed : callable
        From the tokens that came to the figures, asked at the end.

    Attributes
    ----------
    text, tokens : str, list of int
        What has come so far.
    finish_reason : {"eos", "length", "stop"} or None
        None before the end, and of a stream that was closed before it.
    stats : RunSummary or None
        None before the end.
    """

    _open = False

    def __init__(
        self,
        engine: Engine,
        request: Request,
        schedule: Schedule,
        reader: Detokenizer,
        summed: Callable[[list[int]], RunSummary],
    ) -> None:
        self.text, self.tokens = "", list[int]()
        self.finish_reason: FinishReason | None = None
        self.stats: RunSummary | None = None
        self._engine, self._reader, self._summed = engine, reader, summed
        (self._number,) = engine.submit([request], schedule)
        self._open = True

    def __next__(self) -> str:
        while self._open:
            try:
                outputs = self._engine.step()
            except BaseException:
                self._open = False
                self._engine.close()
                raise
            piece = "".join(map(self._take, outputs))
            self.text += piece
            if self.finish_reason is not None:
                self.close()
            if piece:
                return piece
        raise StopIteration

    def close(self) -> None:
        """End it here, if it has not ended."""
        if self._open:
            self._open = False
            self._engine.cancel(self._number)
            self.stats = self._summed(self.tokens)

    def __del__(self) -> None:
        self.close()

    def _take(self, out: StepOutput) -> str:
        self.tokens.append(out.token)
        pieces = self._reader.push(out)
        self.finish_reason = "stop" if self._reader.stopped else out.finish_reason
        return "".join(piece.text for piece in pieces)


class _Decoder:
    """Text of tokens one by one, for tokenizers whose text of a token depends on the tokens before it.

    Decodes a window that begins at a token boundary where the text was whole. Text that ends in a replacement character
    is held back: the character's other bytes may come.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known_tokens = 0
        self._known = ""

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._text(self._window)
        if len(text) <= len(self._known) or text.endswith(_UNFINISHED):
            return ""
        new = text[len(self._known) :]
        self._window = self._window[self._known_tokens :]
        self._known_tokens = len(self._window)
        self._known = self._text(self._window)
        return new

    def rest(self) -> str:
        """What is held back."""
        return self._text(self._window)[len(self._known) :]

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
