"""Domain errors to gRPC status and back. Everything else is a bug and leaves as INTERNAL, with its trace in the log."""

from __future__ import annotations

from typing import NoReturn

import grpc

from outrider.errors import (
    DeadlineExceeded,
    InvalidArgument,
    Mismatch,
    OutriderError,
    Overloaded,
    Preempted,
    Status,
    Unavailable,
    UnknownStream,
)

_RETRY_PUSHBACK = "grpc-retry-pushback-ms"
"""The trailing metadata key with which gRPC servers say when to come back."""

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_ERRORS: dict[Status, type[OutriderError]] = {
    Status.NOT_FOUND: UnknownStream,
    Status.FAILED_PRECONDITION: Mismatch,
    Status.ABORTED: Preempted,
    Status.RESOURCE_EXHAUSTED: Overloaded,
    Status.UNAVAILABLE: Unavailable,
    Status.DEADLINE_EXCEEDED: DeadlineExceeded,
}


def to_code(error: OutriderError) -> grpc.StatusCode:
    """The gRPC code of an error; their numbers are the same by definition of `Status`."""
    return _CODES[int(error.status)]


async def abort(context: grpc.aio.ServicerContext, error: OutriderError) -> NoReturn:
    """End a call with the error's status, and with the time to come back where there is one."""
    trailing: tuple[tuple[str, str], ...] = ()
    if isinstance(error, Overloaded):
        trailing = ((_RETRY_PUSHBACK, str(round(error.retry_after_s * 1_000))),)
    await context.abort(to_code(error), str(error), trailing)
    raise AssertionError("abort returned")


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> OutriderError:
    """What a failed call means to the caller.

    Args:
        error: as raised by grpc.aio.
        peer: who was called, for the message, for example "the draft service at 127.0.0.1:50051".
    """
    code = error.code()
    text = f"{peer}: {error.details() or code.name}"
    if code == grpc.StatusCode.INVALID_ARGUMENT:
        field, separator, problem = (error.details() or "").partition(": ")
        return InvalidArgument(field, problem) if separator else InvalidArgument("request", text)
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        pushback = dict(error.trailing_metadata() or ()).get(_RETRY_PUSHBACK)
        return Overloaded(text, float(pushback) / 1_000) if pushback else Overloaded(text)
    try:
        kind = _ERRORS.get(Status(code.value[0]), OutriderError)
    except ValueError:
        kind = OutriderError
    return kind(text)
