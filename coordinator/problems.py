"""Errors as OpenAI's clients read them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from coordinator.served import UnknownModel
from outrider.errors import InvalidArgument, OutriderError, Overloaded, Status, Unauthenticated

_KINDS = {
    Status.INVALID_ARGUMENT: (400, "invalid_request_error"),
    Status.UNAUTHENTICATED: (401, "invalid_request_error"),
    Status.NOT_FOUND: (404, "invalid_request_error"),
    Status.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    Status.UNAVAILABLE: (503, "service_unavailable_error"),
    Status.DEADLINE_EXCEEDED: (504, "timeout_error"),
}


class BodyTooLarge(InvalidArgument):
    """The body of a request has more bytes than are read; the status is HTTP's own (413)."""

    def __init__(self, limit: int) -> None:
        super().__init__("body", f"is larger than {limit} bytes, which is {limit / 2**20:.3g} MiB")


class Problem(NamedTuple):
    """An error response."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def problem(error: BaseException) -> Problem:
    """How an exception is answered. What is no domain error is a bug, whose text stays in the log."""
    if not isinstance(error, OutriderError):
        return Problem(500, body("internal error; see the coordinator's log", "internal_error"), {})
    status, kind = _KINDS.get(error.status, (500, "internal_error"))
    headers = {}
    param = code = None
    if isinstance(error, InvalidArgument):
        param = error.field
        status = 413 if isinstance(error, BodyTooLarge) else status
    elif isinstance(error, UnknownModel):
        param, code = "model", "model_not_found"
    elif isinstance(error, Unauthenticated):
        code = "invalid_api_key"
        headers["www-authenticate"] = "Bearer"
    elif isinstance(error, Overloaded):
        code = "overloaded"
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    elif status == 503:
        headers["retry-after"] = "1"
    return Problem(status, body(str(error), kind, param, code), headers)


def body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
