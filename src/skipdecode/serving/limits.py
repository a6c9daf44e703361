"""What one request, and all of them together, may take. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServerLimits"]


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of the server; together they bound its memory.

    Parameters
    ----------
    max_rows : int
        Choices that run at a time.
    max_waiting : int
        Choices that wait at a time; beyond that requests are answered with 429.
    max_choices : int
        Choices (prompts times `n`) of a request.
    max_prompt_tokens : int
        Tokens of a prompt.
    max_new_tokens : int
        New tokens of a choice.
    max_seconds : float
        From a request's arrival to its end.
    max_body_bytes : int
        Size of a request.
    max_unread_tokens : int
        Tokens of a stream that its reader has not taken; beyond that the request is dropped.
    stall_seconds : float
        A reader that takes nothing for this time is dropped.
    """

    max_rows: int = 32
    max_waiting: int = 128
    max_choices: int = 16
    max_prompt_tokens: int = 4096
    max_new_tokens: int = 1024
    max_seconds: float = 300.0
    max_body_bytes: int = 2**20
    max_unread_tokens: int = 2048
    stall_seconds: float = 30.0
