"""What one request, and all of them together, may take, and where the server listens. Pure Python.

The help texts are also the command line's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skipdecode.common.options import Options, option
from skipdecode.errors import OptionError

__all__ = ["Binding", "ServerLimits"]


@dataclass(frozen=True, kw_only=True)
class ServerLimits(Options):
    """Bounds of the server; together they bound its memory.

    `max_unread_tokens` counts tokens of a stream that its reader has not taken; beyond that the request is dropped.
    """

    max_rows: int = option("choices decoded together", default=32, least=1)
    max_waiting: int = option("choices that may wait; beyond that requests get 429", default=128, least=0)
    max_choices: int = option("choices (prompts times n) of a request", default=16, least=1)
    max_prompt_tokens: int = option("tokens of a prompt", default=4096, least=1)
    max_new_tokens: int = option("new tokens of a choice", default=1024, least=1)
    max_seconds: float = option("from a request's arrival to its end", default=300.0, above=0)
    max_body_kib: int = option("size of a request, in KiB", default=1024, least=1)
    prefix_cache: bool = option(
        "keep prompts' keys and values, at most 1 GiB beyond the rows' for each drop order, and run no beginning of a "
        "prompt twice (the fast engine on CPUs; others run every prompt whole)",
        default=True,
    )
    prefix_per_key: bool = option(
        "keep the prompts of each API key apart: otherwise an answer's cached_tokens, and its time, tell the holder of "
        "one key whether a prompt of another began like theirs",
        default=False,
    )
    max_unread_tokens: int = 2048
    stall_seconds: float = option("a reader that takes nothing for so long is dropped", default=30.0, above=0)

    @property
    def max_body_bytes(self) -> int:
        """Size of a request in bytes."""
        return self.max_body_kib * 1024


@dataclass(frozen=True, kw_only=True)
class Binding(Options):
    """Where and how the server listens. Port 0 takes a free one."""

    host: str = option("address to listen on; 0.0.0.0 is every network of the machine", default="127.0.0.1")
    port: int = option("to listen on", default=8000, least=0, most=65535)
    drain_seconds: float = option("how long running requests may go on after SIGTERM", default=30.0, above=0)
    max_connections: int = option("open connections; beyond that new ones get 503", default=1024, least=1)
    log_level: Literal["warning", "info", "debug"] = option("of the logs on standard error", default="info")
    cors: tuple[str, ...] = option(
        "origins whose pages may use the server from a browser, such as http://localhost:3000; * is any page",
        default=(),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.cors:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+", origin):
                raise OptionError(
                    "cors", origin, "a scheme and a host without path, such as http://localhost:3000, or *"
                )
