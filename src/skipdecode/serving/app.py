"""The paths of the server, as a FastAPI application behind the `Guard`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from skipdecode import __version__
from skipdecode.serving.auth import KeyRing
from skipdecode.serving.errors import ApiError, error_body
from skipdecode.serving.middleware import Guard
from skipdecode.serving.page import page_files
from skipdecode.serving.protocol import ChatRequest, CompletionRequest, GenerationRequest, TokenizeRequest
from skipdecode.serving.replies import ChatReply, CompletionReply, Reply
from skipdecode.serving.schema import RESPONSES, describe
from skipdecode.serving.service import Service
from skipdecode.serving.streaming import TicketStream, collect
from skipdecode.serving.validation import explain

__all__ = ["create_app"]

T = TypeVar("T")
_STOP_SECONDS = 10.0


def create_app(service: Service, *, keys: KeyRing | None = None, local_only: bool = False) -> ASGIApp:
    """The application; its lifespan starts and stops the service's worker.

    Parameters
    ----------
    service : Service
    keys : KeyRing, optional
        Without one, no key is needed.
    local_only : bool
        See `Guard`.
    """
    # Encoding a long prompt takes a while: one thread of its own, so that the event loop goes on.
    encoding = ThreadPoolExecutor(1, "encoding")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.worker.stop, _STOP_SECONDS)
        encoding.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(title="skipdecode", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _wrong_request)
    app.add_exception_handler(Exception, _crash)
    _add_generation(app, service, encoding)
    _add_models(app, service)
    _add_operations(app, service)
    _add_page(app)
    describe(app)
    return Guard(
        app,
        keys=keys or KeyRing(),
        max_body_bytes=service.limits.max_body_bytes,
        metrics=service.metrics,
        paths=[route.path for route in app.routes if hasattr(route, "path")],
        local_only=local_only,
    )


# ---------------------------------------------------------------------- paths


def _add_generation(app: FastAPI, service: Service, encoding: ThreadPoolExecutor) -> None:
    def in_thread(work: Callable[..., T], *arguments: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(encoding, work, *arguments)

    encoded = 0  # requests whose prompts are being encoded

    async def generate(request: Request, body: GenerationRequest, kind: type[Reply]) -> Response:
        nonlocal encoded
        arrived = time.perf_counter()
        _check_model(service, body.model)
        service.worker.check_room(1 + encoded)
        encoded += 1
        try:
            ticket = await in_thread(service.intake.ticket, body, arrived)
        finally:
            encoded -= 1
        request.state.log = {"schedule": ticket.plan.name, "prompt_tokens": ticket.prompt_tokens}
        service.worker.submit(ticket)
        reply = kind(
            ticket,
            service.name,
            service.token_text,
            logprobs=body.top_logprobs_wanted is not None,
            include_usage=body.include_usage,
        )
        if body.stream:
            return TicketStream(ticket, reply, service)
        return JSONResponse(reply.whole(await collect(ticket, service, request)))

    @app.post("/v1/completions", responses=RESPONSES["completion"])
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Text that goes on from a prompt."""
        return await generate(request, body, CompletionReply)

    @app.post("/v1/chat/completions", responses=RESPONSES["chat"])
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The assistant's next message."""
        return await generate(request, body, ChatReply)

    @app.post("/tokenize", responses=RESPONSES["tokens"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text or a chat."""
        _check_model(service, body.model)
        source = body.prompt if body.prompt is not None else body.messages
        tokens = await in_thread(service.intake.tokens, source)
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": service.intake.context})


def _add_models(app: FastAPI, service: Service) -> None:
    entry = {
        "id": service.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "skipdecode",
        "skipdecode": service.catalog.to_dict(),
    }

    @app.get("/v1/models", responses=RESPONSES["models"])
    async def models() -> Response:
        """The model and its schedules."""
        return JSONResponse({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}", responses=RESPONSES["model"])
    async def model(name: str) -> Response:
        """The same entry, by name."""
        _check_model(service, name)
        return JSONResponse(entry)


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health/live", responses=RESPONSES["health"])
    async def live() -> Response:
        """Whether the server works."""
        return _health(service.worker.alive)

    @app.get("/health", responses=RESPONSES["health"])
    @app.get("/health/ready", responses=RESPONSES["health"])
    async def ready() -> Response:
        """Whether the server takes requests."""
        return _health(service.worker.accepting)

    @app.get("/metrics", responses=RESPONSES["metrics"])
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.render(), media_type=service.metrics.content_type)


def _add_page(app: FastAPI) -> None:
    for path, (content, kind) in page_files().items():
        app.add_route(path, _file(content, kind), include_in_schema=False)


def _file(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def file(request: Request) -> Response:
        return Response(content, media_type=kind)

    return file


def _health(fine: bool) -> Response:
    return JSONResponse({"status": "ok" if fine else "unavailable"}, 200 if fine else 503)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.name:
        raise ApiError(404, "model_not_found", f"there is no such model here: the server has {service.name}", "model")


# ---------------------------------------------------------------------- errors


async def _http_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return JSONResponse(error.body(), error.status_code, error.headers)
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    code = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}.get(status, "invalid_value")
    return JSONResponse(error_body(status, code, str(getattr(error, "detail", error))), status, headers)


async def _wrong_request(request: Request, error: Exception) -> Response:
    found = explain(error.errors() if isinstance(error, RequestValidationError) else [])
    return JSONResponse(found.body(), found.status_code)


async def _crash(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(500, "engine_error", "the server failed; the request is lost"), 500)
