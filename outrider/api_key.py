"""The key that clients show at a coordinator's doors. It travels in the environment and in headers, never in flags."""

from __future__ import annotations

import os

VARIABLE = "OUTRIDER_API_KEY"


def from_environment() -> str | None:
    """The key, or None: an empty variable, as Compose makes of an unset one, is no key."""
    return os.environ.get(VARIABLE) or None


def headers(key: str | None) -> dict[str, str]:
    """What a request comes with, over HTTP and (as metadata) over gRPC."""
    return {"authorization": f"Bearer {key}"} if key else {}
