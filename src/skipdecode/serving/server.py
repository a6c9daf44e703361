"""Runs the application under uvicorn until a signal; then no new connection is taken, and the running requests end.

Connections have bounds: of a request's head, of the time until a request is whole, and of their number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from skipdecode.serving.errors import ApiError

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

from skipdecode.errors import UsageError
from skipdecode.serving.app import create_app
from skipdecode.serving.limits import Binding
from skipdecode.serving.middleware import ApiKeys
from skipdecode.serving.service import Service
from skipdecode.serving.worker import ModelWorker

_UNREAD_SECONDS = 60
_OTHER_FILES = 128  # that the process has open beside connections
_LAST_WORDS_SECONDS = 2  # for errors to go out to those who are cut off
# Between its kernels the model's thread needs the interpreter's lock. While the event loop writes to its streams, the
# thread would wait for up to 5 ms, Python's default.
_SWITCH_SECONDS = 0.00005


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def open_socket(binding: Binding) -> socket.socket:
    """A socket on the address; it takes connections once the server runs.

    Raises UsageError: the address cannot be used.
    """
    found = socket.socket(socket.AF_INET6 if ":" in binding.host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # What was sent to a reader that is gone, or does not read, is kept no longer.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000)
    try:
        found.bind((binding.host, binding.port))
    except OSError as e:
        found.close()
        raise UsageError(f"cannot listen on {binding.host}, port {binding.port}: {e.strerror or e}") from None
    return found


def make_server(service: Service, binding: Binding, keys: ApiKeys | None = None) -> uvicorn.Server:
    """A uvicorn server; its `run` returns once it is stopped."""
    app = create_app(service, keys=keys, local_only=is_loopback(binding.host), cors=binding.cors)
    _log_to_stderr(binding.log_level)
    protocol: Any = bounded_protocol(_within_open_files(binding.max_connections), binding.request_seconds)
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(binding.drain_seconds) + _LAST_WORDS_SECONDS,
        timeout_keep_alive=30,
    )
    return _DrainingServer(config, service.worker, binding.drain_seconds)


def _within_open_files(connections: int) -> int:
    """The number of connections, or as many as the process may open; its limit is raised where that is allowed."""
    if resource is None:
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(connections, soft - _OTHER_FILES))


class _DrainingServer(uvicorn.Server):
    """Tells the worker when it begins to stop, so that requests which do not end in time end with an error."""

    def __init__(self, config: uvicorn.Config, worker: ModelWorker, seconds: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._worker.drain(self._seconds)
        await super().shutdown(sockets)


def run_server(service: Service, binding: Binding, listening: socket.socket, keys: ApiKeys | None = None) -> None:
    """Serve on a socket until SIGINT or SIGTERM."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = make_server(service, binding, keys)
    if threading.current_thread() is threading.main_thread():
        # uvicorn raises the signal that stopped it again; a drained server has ended well.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    server.run([listening])


class _JsonFormatter(logging.Formatter):
    """One object a line: `time`, `level`, `logger`, `message`, the record's `fields`, and of an error the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=str)


def _log_to_stderr(level: str) -> None:
    """Send the lines of the server and of uvicorn to stderr.

    `logging.config.dictConfig` would close the handlers of every other package, and with absl's the stream itself.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    for name in ("skipdecode.serve", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


_MOST_HEAD_BYTES = 64 * 1024
_MOST_PIPELINED = 16  # requests behind one that runs
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 2**22


def bounded_protocol(most_connections: int, request_seconds: float) -> Callable[..., asyncio.Protocol]:
    """A factory of uvicorn's protocol with bounds.

    A connection waits from its start, and from the end of each answer, until the next request is whole. A connection
    that waits too long is closed, and so is the connection that has waited longest if a new one is one too many.

    `most_connections`: open connections at most; if none of them waits, uvicorn answers a request on a further one with
    503. `request_seconds`: most seconds without a request, and most seconds from its first byte to its last.
    """
    waiting: dict[_Bounded, None] = {}  # the longest wait first

    def make(**given: Any) -> asyncio.Protocol:
        return _Bounded(waiting, most_connections, request_seconds, **given)

    return make


class _Bounded(HttpToolsProtocol):
    """One connection; arguments as in `bounded_protocol`, and uvicorn's."""

    def __init__(self, waiting: dict[_Bounded, None], most: int, seconds: float, **given: Any) -> None:
        super().__init__(**given)
        self._all_waiting, self._most, self._seconds = waiting, most, seconds
        self._timer: asyncio.TimerHandle | None = None
        self._receiving = self._in_head = False  # a request; its head
        self._unread: int | None = None  # bytes that are still read behind a refusal
        self._unparsed = 0  # bytes since the parser told of anything
        self._head = 0  # bytes of the request line and of all headers, trailers included

    # ------------------------------------------------------------------ waiting

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._all_waiting[self] = None
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        self._all_waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        """Close the connection: its request is not whole, or there is none."""
        if self._receiving and self._unread is None and not self._answered:
            message = f"the request was not whole in time: send it within {self._seconds:g} s"
            self.transport.write(_response(ApiError(408, "request_timeout", message)))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send an error and end the connection.

        Some of the data that follow are still read: closed at once, the connection would be reset while the client
        sends, and the answer be lost.
        """
        if self._answered or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._wait(_LINGER_SECONDS)
        self._unread = _LINGER_BYTES
        if self.cycle is not None:  # the application waits for the rest of the body
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(_response(error))
        self.transport.write_eof()

    @property
    def _answered(self) -> bool:
        """Whether an answer runs, or the request that is being received has its answer."""
        if self.cycle is None:
            return False
        return bool(self.pipeline) or (
            not self.cycle.response_complete if self._in_head else self.cycle.response_started
        )

    # ------------------------------------------------------------------ events of the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See uvicorn."""
        super().connection_made(transport)
        if len(self.connections) > self._most and self._all_waiting:
            longest = next(iter(self._all_waiting))
            longest._stop_waiting()
            longest._give_up()
            self.connections.discard(longest)  # now, as the request of this connection may come before its end is told
        self._wait(self._seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """See uvicorn."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See uvicorn."""
        if self._unread is not None:
            self._unread -= len(data)
            if self._unread < 0:
                self.transport.close()
            return
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > _MOST_HEAD_BYTES and self._unread is None:
            self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or one whose head is too large."""
        if max(self._unparsed, self._head) > _MOST_HEAD_BYTES:
            message = f"the head of the request is larger than {_MOST_HEAD_BYTES} bytes: send fewer or shorter headers"
            self._refuse(ApiError(431, "headers_too_large", message))
        else:
            self._refuse(ApiError(400, "invalid_http", "this is no HTTP request that the server can read"))

    # ------------------------------------------------------------------ events of the parser

    def on_message_begin(self) -> None:
        """See uvicorn."""
        super().on_message_begin()
        self._receiving, self._in_head, self._head = True, True, 0
        self._wait(self._seconds)

    def on_url(self, url: bytes) -> None:
        """See uvicorn."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """See uvicorn."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """See uvicorn."""
        self._in_head, self._unparsed = False, 0
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise ValueError("too many requests wait on one connection")
        # uvicorn would also count tasks, and those of connections that were closed for this one have not all ended.
        self.limit_concurrency = 0 if len(self.connections) > self._most else None
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        """A part of a body follows, of a client that does not say the length of the whole."""
        self._unparsed = 0

    def on_body(self, body: bytes) -> None:
        """See uvicorn."""
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See uvicorn."""
        super().on_message_complete()
        self._receiving, self._unparsed = False, 0
        self._settle()

    def on_response_complete(self) -> None:
        """See uvicorn."""
        super().on_response_complete()
        if not self._receiving:
            self._settle()

    def _settle(self) -> None:
        """Wait for the next request, if none is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._wait(self._seconds)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > _MOST_HEAD_BYTES:
            raise ValueError("the head is too large")  # ends the parsing with `send_400_response`


def _response(error: ApiError) -> bytes:
    """The whole answer, where there is no application to send it."""
    body = json.dumps(error.body()).encode()
    headers = (
        b"content-type: application/json\r\nconnection: close\r\nx-content-type-options: nosniff\r\n"
        b"cache-control: no-store\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    return STATUS_LINE[error.status_code] + headers + body
