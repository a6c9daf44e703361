"""What pydantic found wrong with a request, in one line that names the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skipdecode.serving.errors import ApiError

__all__ = ["explain"]

_ACCEPTED = {
    "prompt": "give text, a list of texts, a list of token ids, or a list of lists of token ids, none empty",
    "stop": "give text or a list of up to 4 texts, each of 1 to 1000 characters",
    "content": 'give text or a list of {"type": "text", "text": ...}',
    "logit_bias": "give token ids (as text) with numbers from -100 to 100",
}

_LONGEST_NAME = 100


def explain(errors: Sequence[Any]) -> ApiError:
    """The error for a client, from pydantic's list of errors."""
    if not errors:
        return ApiError(400, "invalid_value", "the request is not valid")
    first = errors[0]
    path = [part for part in first["loc"] if part not in ("body", "query", "path")]
    param = _field(path)
    kind = first["type"]
    if kind == "json_invalid":
        return ApiError(400, "invalid_json", "the body is not JSON")
    if not path:
        return ApiError(400, "invalid_json", "give a JSON object as the body, with content-type: application/json")
    if kind == "extra_forbidden":
        return ApiError(400, "unknown_field", f"the field {param} is not known: leave it out", param)
    if kind == "missing":
        return ApiError(400, "invalid_value", f"the field {param} is missing", param)
    for name, accepted in _ACCEPTED.items():
        if name in path:
            param = _field(path[: path.index(name) + 1])
            return ApiError(400, "invalid_value", f"{param} is not accepted: {accepted}", param)
    return ApiError(400, "invalid_value", f"{param} is not accepted: {_lower(first['msg'])}", param)


def _field(path: list[Any]) -> str:
    """The field's name; what a client made up is cut to what can be sent back."""
    return ".".join(str(part) for part in path)[:_LONGEST_NAME].encode("utf-8", "replace").decode()


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]
