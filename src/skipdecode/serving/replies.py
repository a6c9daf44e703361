"""From a ticket's events to OpenAI's JSON: whole responses, and the chunks of streams. Two shapes, one interface."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from skipdecode.serving.request_state import Event, Failed, Finished, FinishReason, Summary, Ticket, Update
from skipdecode.serving.text_stream import Piece

__all__ = ["ChatReply", "CompletionReply", "Reply"]

DONE = b"data: [DONE]\n\n"
TokenText = Callable[[int], str]


class Reply(ABC):
    """Writes the answer to one request.

    Parameters
    ----------
    ticket : Ticket
    model : str
        The served name.
    token_text : callable
        Text of a single token, for log-probabilities.
    logprobs : bool
        Whether log-probabilities are wanted.
    include_usage : bool
        Whether a stream ends with a chunk that has the usage.
    """

    prefix: str
    object: str
    chunk_object: str

    def __init__(
        self, ticket: Ticket, model: str, token_text: TokenText, *, logprobs: bool, include_usage: bool = False
    ) -> None:
        self._ticket = ticket
        self._token_text = token_text
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._lengths = [0] * len(ticket.choices)

    # ------------------------------------------------------------------ the two shapes

    @abstractmethod
    def _whole_choice(self, text: str) -> dict[str, Any]:
        """A choice's text in a whole response."""

    @abstractmethod
    def _part_of_choice(self, text: str) -> dict[str, Any]:
        """New text in a chunk."""

    @abstractmethod
    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Log-probabilities of tokens."""

    # ------------------------------------------------------------------ whole

    def whole(self, events: list[Event]) -> dict[str, Any]:
        """The response, from all events of a ticket that finished."""
        choices = []
        for index in range(len(self._ticket.choices)):
            updates = [event for event in events if isinstance(event, Update) and event.choice == index]
            pieces = [piece for update in updates for piece in update.pieces]
            choice = {"index": index} | self._whole_choice("".join(piece.text for piece in pieces))
            choices.append(choice | self._details(index, pieces, updates[-1].finish_reason))
        summary = next(event.summary for event in events if isinstance(event, Finished))
        return {
            "object": self.object,
            **self._head,
            "choices": choices,
            "usage": _usage(summary),
            "skipdecode": dataclasses.asdict(summary),
        }

    # ------------------------------------------------------------------ stream

    def opening(self) -> bytes:
        """What goes out before any token."""
        return b""

    def chunks(self, events: list[Event]) -> bytes:
        """Server-sent events for events of the ticket; ends with `[DONE]` if it finished."""
        summary = next((event.summary for event in events if isinstance(event, Finished)), None)
        lines = []
        updates = _merged(events)
        for update in updates:
            choice = self._chunk_choice(update)
            if choice is not None:
                last = update is updates[-1] and not self._include_usage
                lines.append(self._chunk([choice], summary if last else None))
        failed = next((event.error for event in events if isinstance(event, Failed)), None)
        if failed is not None:
            lines.append(sse(failed.body()))
        if summary is not None:
            if self._include_usage:
                lines.append(self._chunk([], summary))
            lines.append(DONE)
        return b"".join(lines)

    def _chunk_choice(self, update: Update) -> dict[str, Any] | None:
        text = "".join(piece.text for piece in update.pieces)
        if not text and update.finish_reason is None and not self._logprobs and not self._ticket.trace:
            return None
        choice = {"index": update.choice} | self._part_of_choice(text)
        return choice | self._details(update.choice, update.pieces, update.finish_reason)

    def _chunk(self, choices: list[dict[str, Any]], summary: Summary | None) -> bytes:
        chunk: dict[str, Any] = {"object": self.chunk_object, **self._head, "choices": choices}
        if self._include_usage:
            chunk["usage"] = None if summary is None else _usage(summary)
        if summary is not None:
            chunk["skipdecode"] = dataclasses.asdict(summary)
        return sse(chunk)

    # ------------------------------------------------------------------ both

    def _details(self, index: int, pieces: list[Piece], finish_reason: FinishReason | None) -> dict[str, Any]:
        details: dict[str, Any] = {
            "logprobs": self._logprobs_of(index, pieces) if self._logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._ticket.trace:
            details["skipdecode"] = {
                "tokens": [
                    {"id": out.token, "text": text, "position": out.position, "layers": out.layers}
                    for out, text in pieces
                ]
            }
        return details


class CompletionReply(Reply):
    """/v1/completions."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _part_of_choice = _whole_choice

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        offsets = []
        for piece in pieces:
            offsets.append(self._lengths[index])
            self._lengths[index] += len(piece.text)
        return {
            "tokens": [self._token_text(out.token) for out, _ in pieces],
            "token_logprobs": [out.logprob for out, _ in pieces],
            "top_logprobs": [{self._token_text(t): value for t, value in out.top} for out, _ in pieces],
            "text_offset": offsets,
        }


class ChatReply(Reply):
    """/v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        """The role of each choice."""
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(len(self._ticket.choices))
        ]
        return b"".join(self._chunk([choice], None) for choice in choices)

    def _whole_choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part_of_choice(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs_of(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        content = [
            self._entry(out.token, out.logprob) | {"top_logprobs": [self._entry(t, value) for t, value in out.top]}
            for out, _ in pieces
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _merged(events: list[Event]) -> list[Update]:
    """Updates, those of a choice as one where the reader was slower than the model; a choice that ends comes later."""
    merged: dict[int, Update] = {}
    for event in events:
        if isinstance(event, Update):
            before = merged.pop(event.choice, None)
            pieces = event.pieces if before is None else before.pieces + event.pieces
            merged[event.choice] = Update(event.choice, pieces, event.finish_reason)
    return list(merged.values())


def _usage(summary: Summary) -> dict[str, int]:
    return {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }
