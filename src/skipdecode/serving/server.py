"""Runs the application under uvicorn until a signal; then no new connection is taken, and the running requests end."""

from __future__ import annotations

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
from typing import Any

import uvicorn

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
_MOST_HEAD_BYTES = 64 * 1024  # of a request line with its headers
_LAST_WORDS_SECONDS = 2  # for errors to go out to those who are cut off
# Between its kernels the model's thread needs the interpreter's lock. While the event loop writes to its streams, the
# thread would wait for up to 5 ms, Python's default.
_SWITCH_SECONDS = 0.00005


def open_socket(binding: Binding) -> socket.socket:
    """A socket on the address; it takes connections once the server runs.

    Raises UsageError: the address cannot be used.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in binding.host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # What was sent to a reader that is gone, or does not read, is kept no longer.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_SECONDS * 1000)
    try:
        listening.bind((binding.host, binding.port))
    except OSError as e:
        listening.close()
        raise UsageError(f"cannot listen on {binding.host}, port {binding.port}: {e.strerror or e}") from None
    return listening


def make_server(service: Service, binding: Binding, keys: ApiKeys | None = None) -> uvicorn.Server:
    """A uvicorn server; its `run` returns once it is stopped."""
    _log_to_stderr(binding.log_level)
    _raise_open_files()
    connections = set[Any]()
    config = uvicorn.Config(
        create_app(service, binding, keys or ApiKeys(), connections),
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
        timeout_graceful_shutdown=math.ceil(binding.drain_seconds) + _LAST_WORDS_SECONDS,
        timeout_keep_alive=math.ceil(binding.request_seconds),
    )
    server = _DrainingServer(config, service.worker, binding.drain_seconds)
    # Counted by the middleware: the limit of uvicorn would refuse health checks, too.
    server.server_state.connections = connections
    return server


def _raise_open_files() -> None:
    """Have the process open as many files as it may: each connection is one."""
    if resource is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _DrainingServer(uvicorn.Server):
    """Tells the worker when it begins to stop, so that requests which do not end in time end with an error."""

    def __init__(self, config: uvicorn.Config, worker: ModelWorker, seconds: float) -> None:
        super().__init__(config)
        self._worker = worker
        self._seconds = seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down as uvicorn does, and drain the worker."""
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
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
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
