"""Limits of a request and of the server, and the address of the server. Pure Python.

The help texts are also those of the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from skipdecode.common.options import Options, option
from skipdecode.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class ServerLimits(Options):
    """Limits that together bound the memory of the server.

    A stream is dropped if its client has left more than `max_unread_tokens` tokens unread.
    """

    max_rows: int = option("most choices that are decoded together", default=32, least=1)
    max_waiting: int = option("most choices that wait; further requests get 429", default=128, least=0)
    max_choices: int = option("most choices (prompts times n) of a request", default=16, least=1)
    max_prompt_tokens: int = option("most tokens of a prompt", default=4096, least=1)
    max_new_tokens: int = option("most new tokens of a choice", default=1024, least=1)
    max_seconds: float = option("most seconds from the arrival of a request to its end", default=300.0, above=0)
    max_body_kib: int = option("most KiB of a request", default=1024, least=1)
    prefix_cache: bool = option(
        "keep keys and values of prompts (at most 1 GiB, beyond those of running sequences), and "
        "reuse them for prompts with the same beginning (fast engine only); off: drafts are not from others' answers",
        default=True,
    )
    prefix_per_key: bool = option(
        "a prefix cache, and earlier answers for drafts, for each API key: with shared ones, cached_tokens and the "
        "time of an answer show the holder of one key whether a prompt of another key had the same beginning",
        default=False,
    )
    max_unread_tokens: int = 2048
    stall_seconds: float = option("a client that reads nothing for so many seconds is dropped", default=30.0, above=0)


@dataclass(frozen=True, kw_only=True)
class Binding(Options):
    """The address and the connections of the server. Port 0 selects a free port."""

    host: str = option("address to listen on; 0.0.0.0: all networks of the machine", default="127.0.0.1")
    port: int = option("port to listen on", default=8000, least=0, most=65535)
    drain_seconds: float = option("seconds in which running requests may finish after SIGTERM", default=30.0, above=0)
    max_connections: int = option(
        "most open connections; while there are more, requests but health checks get 503", default=1024, least=1
    )
    request_seconds: float = option(
        "most seconds from the head of a request to the end of its body, and until the next request on a connection",
        default=30.0,
        above=0,
    )
    log_level: Literal["warning", "info", "debug"] = option("level of the log on standard error", default="info")
    cors: tuple[str, ...] = option(
        "origins of web pages that may use the server, such as http://localhost:3000; *: all pages", default=()
    )

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the address."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.cors:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+", origin):
                raise OptionError(
                    "cors", origin, "a scheme and a host without path, such as http://localhost:3000, or *"
                )
