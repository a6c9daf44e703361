"""Errors that clients see, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException

__all__ = ["ApiError", "error_body"]


class ApiError(HTTPException):
    """A request that is refused or fails.

    Parameters
    ----------
    status : int
        HTTP status.
    code : str
        For programs; the list is in docs/serve.md.
    message : str
        For people: what was wrong and what is accepted.
    param : str, optional
        The field.
    headers : dict of str to str, optional
        Further headers.
    """

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        return error_body(self.status_code, self.code, self.detail, self.param)


def error_body(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """`{"error": …}` as OpenAI's clients expect it."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
