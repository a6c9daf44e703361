"""What one request, and all of them together, may take. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServerLimits"]


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of the server; together they bound its memory."""

    max_rows: int = 32  # choices that run at a time
    max_waiting: int = 128  # choices that wait at a time; beyond that requests are answered with 429
    max_choices: int = 16  # choices (prompts times `n`) of a request
    max_prompt_tokens: int = 4096  # of a prompt
    max_new_tokens: int = 1024  # of a choice
    max_seconds: float = 300.0  # from a request's arrival to its end
    max_body_bytes: int = 2**20  # of a request
    max_unread_tokens: int = 2048  # that a stream's reader has not taken; beyond that the request is dropped
    stall_seconds: float = 30.0  # a reader that takes nothing for this time is dropped
