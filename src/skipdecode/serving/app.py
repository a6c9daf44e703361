"""The paths of the server, as a FastAPI application behind the `Middleware`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from secrets import token_hex
from typing import Any

from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from skipdecode import __version__
from skipdecode.serving.errors import ApiError, ErrorResponse, add_error_handlers
from skipdecode.serving.limits import Binding
from skipdecode.serving.middleware import ApiKeys, Middleware
from skipdecode.serving.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from skipdecode.serving.responses import (
    ChatResponseBuilder,
    CompletionResponseBuilder,
    EventStreamResponse,
    ResponseBuilder,
    collect,
)
from skipdecode.serving.service import Service

_STOP_SECONDS = 10.0
_MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
# Of one event; its data is JSON (a chunk, or an error), and "[DONE]" at the end.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_OR_STREAM: dict[int | str, Any] = {200: {"content": {"text/event-stream": {"schema": _EVENT}}}}


def create_app(service: Service, binding: Binding, keys: ApiKeys, connections: Collection[object]) -> ASGIApp:
    """The application on an address, with the connections that are open; its lifespan starts and stops the worker."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start(asyncio.get_running_loop())
        yield
        await asyncio.to_thread(service.worker.stop, _STOP_SECONDS)

    failure = {"model": ErrorResponse, "description": "A failure"}
    app = FastAPI(
        title="skipdecode",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={"4XX": failure, "5XX": failure},
    )
    add_error_handlers(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    _add_page(app)
    guarded = Middleware(
        app,
        keys=keys,
        limits=service.model.limits,
        binding=binding,
        connections=connections,
        metrics=service.metrics,
        paths=[route.path for route in app.routes if hasattr(route, "path")],
    )
    if not binding.cors:
        return guarded
    # Outermost: what a browser asks beforehand comes without a key, and a refusal is to be read too.
    exposed = ("x-request-id", "retry-after")
    return CORSMiddleware(
        guarded, binding.cors, allow_methods=("GET", "POST"), allow_headers="*", expose_headers=exposed
    )


def _add_generation(app: FastAPI, service: Service) -> None:
    # Encoding a long prompt takes a while: in a thread, so that the event loop goes on, and one at a time.
    in_thread = partial(to_thread.run_sync, limiter=CapacityLimiter(1))
    encoded = 0  # requests whose prompts are being encoded
    limits = service.model.limits

    async def generate(request: Request, body: GenerationRequest, kind: type[ResponseBuilder]) -> Response:
        nonlocal encoded
        _check_model(service, body.model)
        service.worker.check_room(1 + encoded)
        encoded += 1
        try:
            salt = "" if limits.prefix_cache else token_hex()
            if limits.prefix_per_key:
                salt = request.state.key_holder
            sequences = await in_thread(service.preprocessor.sequences_of, body, salt)
        finally:
            encoded -= 1
        request.state.log = {"schedule": sequences.schedule.name, "prompt_tokens": sequences.prompt_tokens}
        stream = service.worker.submit(sequences, request.state.arrived)
        builder = kind(stream, body, service.model.name, service.texts)
        if body.stream:
            return EventStreamResponse(stream, builder, service)
        return Response(builder.response(await collect(stream, service, request)), media_type="application/json")

    @app.post("/v1/completions", responses=_OR_STREAM, response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Text that goes on from a prompt."""
        return await generate(request, body, CompletionResponseBuilder)

    @app.post("/v1/chat/completions", responses=_OR_STREAM, response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The assistant's next message."""
        return await generate(request, body, ChatResponseBuilder)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, object]:
        """Token ids of a text or a chat."""
        _check_model(service, body.model)
        tokens = await in_thread(service.preprocessor.tokens, body.source, body.add_special_tokens)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": service.model.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids, special tokens included."""
        _check_model(service, body.model)
        return {"prompt": await in_thread(service.preprocessor.text, body.tokens)}


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        """The model and its schedules."""
        return {"object": "list", "data": [service.entry]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, object]:
        """The same entry, by name."""
        _check_model(service, name)
        return service.entry


def _add_operations(app: FastAPI, service: Service) -> None:
    answers: dict[int | str, Any] = {503: {"description": "Not now"}}

    @app.get("/health/live", responses=answers)
    async def live(response: Response) -> dict[str, str]:
        """Whether the server works."""
        return _health(response, service.worker.alive)

    @app.get("/health", responses=answers)
    @app.get("/health/ready", responses=answers)
    async def ready(response: Response) -> dict[str, str]:
        """Whether the server takes requests."""
        return _health(response, service.worker.accepting)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_page(app: FastAPI) -> None:
    """The pages; their files are kept in memory, and a request's path is only looked up among them."""
    for file in files("skipdecode.serving").joinpath("static").iterdir():
        kind = _MEDIA_TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            app.add_route(path, partial(_file, file.read_bytes(), kind), include_in_schema=False)


async def _file(content: bytes, kind: str, request: Request) -> Response:
    return Response(content, media_type=kind)


def _health(response: Response, fine: bool) -> dict[str, str]:
    response.status_code = 200 if fine else 503
    return {"status": "ok" if fine else "unavailable"}


def _check_model(service: Service, name: str | None) -> None:
    if name is not None and name != service.model.name:
        message = f"there is no such model here: the server has {service.model.name}"
        raise ApiError(404, "model_not_found", message, "model")
