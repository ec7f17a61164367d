"""Domain errors. Each carries the status that both doors (gRPC and HTTP) derive their codes from."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """Outcome of one item on a link; the values are those of google.rpc.Code."""

    OK = 0
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class OutriderError(Exception):
    """Base of every error that a user may see; `status` decides the code at either door."""

    status = Status.INTERNAL


class InvalidArgument(OutriderError):
    """Bad input: names the field and, where there is one, the limit it broke."""

    status = Status.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class UnknownStream(OutriderError):
    """The service does not hold this stream; the coordinator re-opens it with all committed tokens."""

    status = Status.NOT_FOUND


class StaleCache(OutriderError):
    """The item starts beyond what the service holds, or its prefix differs; re-send from `cached_length`."""

    status = Status.FAILED_PRECONDITION

    def __init__(self, message: str, cached_length: int = 0) -> None:
        super().__init__(message)
        self.cached_length = cached_length


class Mismatch(OutriderError):
    """Two parts do not fit together: protocol, tokenizer or vocabulary."""

    status = Status.FAILED_PRECONDITION


class Preempted(OutriderError):
    """The stream lost its KV to others; the coordinator re-opens it with all committed tokens."""

    status = Status.ABORTED


class Overloaded(OutriderError):
    """A bounded queue or pool is full; nothing was started."""

    status = Status.RESOURCE_EXHAUSTED

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(OutriderError):
    """Loading, draining, or the other side cannot be reached."""

    status = Status.UNAVAILABLE


class DeadlineExceeded(OutriderError):
    """The request's own time limit ran out."""

    status = Status.DEADLINE_EXCEEDED


class PermissionDenied(OutriderError):
    """The peer is known, and is not the one who may do this."""

    status = Status.PERMISSION_DENIED


class Unauthenticated(OutriderError):
    """The client shows no key, or none that is known."""

    status = Status.UNAUTHENTICATED


class ModelUnavailable(OutriderError):
    """A model could not be had: one line that says why and what to do about it."""

    status = Status.NOT_FOUND


class ModelRefused(OutriderError):
    """The engine does not run this model: names its architecture and the reason."""

    status = Status.FAILED_PRECONDITION


class DoesNotFit(OutriderError):
    """Weights, KV and workspace exceed the device's memory; the message holds the numbers."""

    status = Status.FAILED_PRECONDITION


class NonFiniteLogits(OutriderError):
    """The model produced NaN, +inf, or a row without any finite logit."""

    status = Status.INTERNAL
