"""Errors that clients see, in OpenAI's shape, and how other exceptions become them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

_ACCEPTED = {
    "prompt": "give text, a list of texts, a list of token ids, or a list of lists of token ids, none empty",
    "stop": "give text or a list of up to 16 texts, each of 1 to 1000 characters",
    "content": 'give text or a list of {"type": "text", "text": ...}',
    "guided_json": "give a JSON schema, as an object or as its text",
    "tool_choice": 'give none, auto, required, or {"type": "function", "function": {"name": ...}}',
    "logit_bias": "give token ids (as text) with numbers from -100 to 100",
}
_LONGEST_NAME = 100


class _Error(BaseModel, extra="forbid"):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel, extra="forbid"):
    """The body of every status of 400 and above."""

    error: _Error


class ApiError(HTTPException):
    """A request that is refused or fails.

    `code`: a word for programs; the list is in docs/serve.md. `message`: for people: what was wrong and what is
    accepted. `param`: the field of the request that is not accepted.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, _sendable(message), headers)
        self.code = code
        self.param = None if param is None else _sendable(param)

    def body(self) -> dict[str, object]:
        """An `ErrorResponse`, as OpenAI's clients expect it."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status_code, self.headers)


def _sendable(text: str) -> str:
    """A text that may have a client's words in it, without half of a surrogate pair."""
    return text.encode(errors="replace").decode()


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, "invalid_value", message, param)


def add_error_handlers(app: FastAPI) -> None:
    """Have an application answer every exception with an `ErrorResponse`."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        code = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        headers = dict(error.headers or {})
        message = error.detail
        if error.status_code == 400:  # FastAPI gives no reason
            message = "the body is not JSON in UTF-8, or has too deep lists or too long numbers"
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path[:_LONGEST_NAME]} is not served: /openapi.json lists what is"
        if error.status_code == 405:
            # Where GET is, there is HEAD, and OPTIONS is everywhere.
            methods = {*headers["Allow"].split(", "), "OPTIONS"}
            headers["Allow"] = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
        return ApiError(error.status_code, code or "invalid_value", message, headers=headers).response()

    @app.exception_handler(RequestValidationError)
    async def wrong_request(request: Request, error: RequestValidationError) -> Response:
        return _explained(error.errors(), request.headers.get("content-type", "")).response()

    @app.exception_handler(Exception)
    async def crash(request: Request, error: Exception) -> Response:
        return ApiError(500, "engine_error", "the server failed; the request is lost").response()


def _explained(errors: Sequence[Any], content_type: str) -> ApiError:
    """Describe in one line what pydantic found wrong with a request of this content type; it names the field."""
    first = errors[0]
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    param = _field(path)
    kind = first["type"]
    if kind == "json_invalid":
        return ApiError(400, "invalid_json", "the body is not JSON")
    if not path and content_type and "json" not in content_type.lower():
        return ApiError(415, "unsupported_media_type", "send JSON, with content-type: application/json")
    if not path:
        return ApiError(400, "invalid_json", "give a JSON object as the body, with content-type: application/json")
    if kind == "extra_forbidden":
        return ApiError(400, "unknown_field", f"the field {param} is not known: leave it out", param)
    if kind == "missing":
        return ApiError(400, "invalid_value", f"the field {param} is missing", param)
    accepted = first["msg"][:1].lower() + first["msg"][1:]
    name = next((part for part in path if part in _ACCEPTED), None)
    if name is not None:
        param, accepted = _field(path[: path.index(name) + 1]), _ACCEPTED[name]
    return ApiError(400, "invalid_value", f"{param}{_entry(errors)} is not accepted: {accepted}", param)


def _entry(errors: Sequence[Any]) -> str:
    """The index of the wrong entry of a list of prompts, by the kind of list that fits longest."""
    first: dict[str, int] = {}
    for error in errors:
        match error["loc"]:
            case ("body", "prompt", kind, int(index), *_):
                first.setdefault(kind, index)
    return f"[{max(first.values())}]" if first else ""


def _field(path: list[str | int]) -> str:
    """The field's name; what a client made up is cut."""
    return ".".join(str(part) for part in path)[:_LONGEST_NAME]
