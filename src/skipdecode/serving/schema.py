"""The responses, as pydantic models for the description of the interface (/openapi.json)."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from skipdecode.serving.request_state import Summary

__all__ = ["RESPONSES", "describe"]


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Error(_Exact):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(_Exact):
    """Any status of 400 and above."""

    error: _Error


class _Usage(_Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _TracedToken(_Exact):
    id: int
    text: str
    position: int
    layers: int


class _Trace(_Exact):
    tokens: list[_TracedToken]


class _Choice(_Exact):
    index: int
    finish_reason: Literal["stop", "length"]
    skipdecode: _Trace | None = None


class _CompletionLogprobs(_Exact):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class _CompletionChoice(_Choice):
    text: str
    logprobs: _CompletionLogprobs | None


class _Token(_Exact):
    token: str
    logprob: float
    bytes: list[int]


class _TokenWithTop(_Token):
    top_logprobs: list[_Token]


class _ChatLogprobs(_Exact):
    content: list[_TokenWithTop]
    refusal: None


class _AssistantMessage(_Exact):
    role: Literal["assistant"]
    content: str
    refusal: None


class _ChatChoice(_Choice):
    message: _AssistantMessage
    logprobs: _ChatLogprobs | None


class _Answer(_Exact):
    id: str
    created: int
    model: str
    usage: _Usage
    skipdecode: Summary


class CompletionResponse(_Answer):
    """Of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[_CompletionChoice]


class ChatResponse(_Answer):
    """Of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[_ChatChoice]


class _ScheduleEntry(_Exact):
    name: str
    nominal_speedup: float
    mean_budget: float
    seq_len: int
    warmup_layers: int
    budgets: list[int]
    drop_order: list[int]


class _Budget(_Exact):
    least: int
    most: int
    drop_order: list[int]


class _Schedules(_Exact):
    num_layers: int
    default_schedule: str
    budget: _Budget
    schedules: list[_ScheduleEntry]


class ModelEntry(_Exact):
    """The model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    skipdecode: _Schedules


class ModelList(_Exact):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class TokensResponse(_Exact):
    """Of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int | None


class HealthResponse(_Exact):
    """Of the health checks."""

    status: Literal["ok", "unavailable"]


# Of one event; its data is JSON (a chunk, or an error), and "[DONE]" at the end.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}


def _answers(model: type[BaseModel], *failures: int, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    found: dict[int | str, dict[str, Any]] = {200: {"model": model}}
    if stream:
        found[200]["content"] = {"text/event-stream": {"schema": _EVENT}}
    return found | {status: {"model": ErrorResponse} for status in failures}


_GENERATION = (400, 401, 404, 413, 429, 500, 503, 504)
RESPONSES: dict[str, dict[int | str, dict[str, Any]]] = {
    "completion": _answers(CompletionResponse, *_GENERATION, stream=True),
    "chat": _answers(ChatResponse, *_GENERATION, stream=True),
    "tokens": _answers(TokensResponse, 400, 401, 404, 413, 500),
    "models": _answers(ModelList, 401),
    "model": _answers(ModelEntry, 401, 404),
    "health": _answers(HealthResponse) | {503: {"model": HealthResponse}},
    "metrics": {
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus"},
        401: {"model": ErrorResponse},
    },
}


def describe(app: FastAPI) -> None:
    """Take FastAPI's own error out of the description: this server answers 400 where FastAPI would answer 422."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        schema = make()
        for methods in schema["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
