"""What stands in front of every request: target, host, key, size; and behind it: headers, a line of log, a count."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import time
import uuid
from collections.abc import Collection, Iterable
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipdecode.errors import UsageError
from skipdecode.serving.errors import ApiError, invalid
from skipdecode.serving.limits import Binding, ServerLimits
from skipdecode.serving.metrics import Metrics

ENVIRONMENT_VARIABLE = "SKIPDECODE_API_KEY"
_LOG = logging.getLogger("skipdecode.serve")
_CLOSED_PATHS = ("/v1/", "/tokenize", "/detokenize", "/metrics")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)
_TIMED = ("/v1/completions", "/v1/chat/completions")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]*)?")
_LOCAL = ("localhost", "127.0.0.1", "[::1]")
_SINGLE = (b"host", b"authorization", b"content-type", b"content-encoding")
_AUTHORITY = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)


class ApiKeys:
    """The keys that are accepted; with none, everybody is.

    `hashes`: SHA-256 of the keys, as 64 hexadecimal digits.
    """

    def __init__(self, hashes: tuple[str, ...] = ()) -> None:
        self._hashes = tuple(value.lower().encode() for value in hashes)

    @classmethod
    def read(cls, path: str | None) -> ApiKeys:
        """Keys from a file of hashes, one a line (# begins a comment), and from the environment, in plain, with commas.

        Raises UsageError: the file cannot be read, or a line is no hash.
        """
        hashes = []
        if path is not None:
            try:
                lines = Path(path).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as e:
                raise UsageError(f"cannot read the API keys in {path}: {e}") from None
            for number, line in enumerate(lines, 1):
                # sha256sum writes a dash, for standard input, behind the hash.
                value = line.partition("#")[0].strip().removesuffix("-").rstrip()
                if value and not re.fullmatch(r"[0-9a-fA-F]{64}", value):
                    raise UsageError(
                        f"{path}, line {number}: not the SHA-256 of a key; make one with: printf %s KEY | sha256sum"
                    )
                hashes += [value] if value else []
            if not hashes:
                raise UsageError(f"{path} holds no key: leave the file out to need none")
        keys = os.environ.get(ENVIRONMENT_VARIABLE, "").split(",")
        hashes += [_hash(os.fsencode(key.strip())) for key in keys if key.strip()]
        return cls(tuple(hashes))

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def holder(self, authorization: bytes) -> str | None:
        """The hash of the key in an Authorization header's value; None if it is none of the keys."""
        scheme, _, key = authorization.partition(b" ")
        digest = _hash(key.strip())
        # All are compared, so that the time tells nothing.
        known = [hmac.compare_digest(digest.encode(), value) for value in self._hashes]
        return digest if scheme.lower() == b"bearer" and any(known) else None


def _hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


class Middleware:
    """The ASGI layer before the application.

    `keys`: for everything but the page, the health checks and the description of the interface. `paths`: paths that are
    counted by their own names; all others are counted as "other". `connections`: those that are open now.

    On loopback, requests whose Host is not a name of this machine are refused: a page elsewhere that has its name point
    here (DNS rebinding) is not to use the server.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: ApiKeys,
        limits: ServerLimits,
        binding: Binding,
        connections: Collection[object],
        metrics: Metrics,
        paths: Iterable[str],
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = limits.max_body_kib * 1024
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._local_only = binding.is_local
        self._request_seconds = binding.request_seconds
        self._connections, self._most_connections = connections, binding.max_connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = 0
        scope = _with_origin_form(scope)
        state = scope.setdefault("state", {})
        state |= {"outcome": None, "arrived": start}

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], *_HEADERS, (b"x-request-id", request_id)]}
            await send(message)

        request_id = uuid.uuid4().hex.encode()
        try:
            self._check(scope)
            # HEAD is GET, but that uvicorn sends no body.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            await self._app({**scope, "method": method}, self._bounded(receive), noting)
        except ApiError as error:
            await error.response()(scope, receive, noting)
        except asyncio.CancelledError:
            # uvicorn cancels what does not end in time when it stops: no error of the application.
            state["outcome"] = "cancelled"
        finally:
            self._note(scope, status, state["outcome"], time.perf_counter() - start, request_id)

    def _check(self, scope: Scope) -> None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path: str = scope["path"]
        if len(self._connections) > self._most_connections and not path.startswith("/health"):
            message = f"more than {self._most_connections} connections are open: try later"
            raise ApiError(503, "too_many_connections", message, headers={"Connection": "close"})
        names = [name for name, _ in scope["headers"]]
        if (twice := next((name for name in _SINGLE if names.count(name) > 1), None)) is not None:
            raise invalid(f"the request has several {twice.decode()} headers: send one")
        host = headers.get(b"host")  # HTTP/1.0 may leave it out
        name = None if host is None else _HOST.fullmatch(host.decode("latin-1"))
        if host is not None and name is None:
            raise invalid("the Host header is not accepted: give a name or an address, and a port")
        if self._local_only and name is not None and name[1].lower() not in _LOCAL:
            raise invalid("this Host is not known here: use 127.0.0.1 or localhost, or start the server with --host")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            message = "a body in a content-encoding is not read: send it as it is"
            raise ApiError(415, "unsupported_media_type", message, headers={"Accept-Encoding": "identity"})
        holder = self._keys.holder(headers.get(b"authorization", b""))
        scope["state"]["key_holder"] = holder or ""
        if self._keys and path.startswith(_CLOSED_PATHS) and holder is None:
            message = "no API key that is known here: send Authorization: Bearer KEY"
            raise ApiError(401, "invalid_api_key", message, headers={"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """The messages of a request's body, within the limits of size and time."""
        room = self._max_body_bytes
        end: float | None = asyncio.get_running_loop().time() + self._request_seconds

        async def bounded() -> Message:
            nonlocal room, end
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                text = f"the body was not whole in time: send it within {self._request_seconds:g} s"
                raise ApiError(408, "request_timeout", text, headers={"Connection": "close"}) from None
            room -= len(message.get("body", b""))
            if room < 0:
                raise self._too_large()
            if not message.get("more_body"):
                end = None  # only the end of the connection is awaited now
            return message

        return bounded

    def _too_large(self) -> ApiError:
        # The connection stays: the server reads past the rest of the body. Closed at once, it would be reset while the
        # client still sends, and the answer be lost.
        return ApiError(413, "request_too_large", f"the request is larger than {self._max_body_bytes} bytes")

    def _note(self, scope: Scope, status: int, outcome: str | None, seconds: float, request_id: bytes) -> None:
        path = scope["path"] if scope["path"] in self._paths else "other"
        outcome = outcome or _outcome(status)
        self._metrics.requests.labels(path, outcome).inc()
        # What was refused at once would make the others look quick.
        if path in _TIMED and status == 200:
            self._metrics.request_seconds.observe(seconds)
        fields = {
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "outcome": outcome,
            "seconds": round(seconds, 4),
            "request": request_id.decode(),
        }
        _LOG.info("request", extra={"fields": fields | scope["state"].get("log", {})})


def _with_origin_form(scope: Scope) -> Scope:
    """The request with a target such as /v1/models.

    A target with scheme and host says the host, a slash at the end says nothing, and * (the whole server) is the page.
    """
    path, headers = scope["path"], scope["headers"]
    authority = _AUTHORITY.match(path)
    if authority is not None:
        path = path[authority.end() :]
        headers = [*(header for header in headers if header[0] != b"host"), (b"host", authority[1].encode())]
    path = "/" if path == "*" else path.rstrip("/") or "/"
    return {**scope, "path": path, "headers": headers}


def _outcome(status: int) -> str:
    if status == 0:
        return "cancelled"
    if status == 429:
        return "queue_full"
    if status >= 500:
        return "error"
    return "refused" if status >= 400 else "ok"
