"""Asks for an API key before anything else of an HTTP request is looked at."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.front import Front
from coordinator.problems import problem
from outrider.errors import Unauthenticated

OPEN = ("/health", "/ready")
"""What load balancers and health checks ask, who have no key."""


class KeyCheck:
    """ASGI middleware; leaves who is calling in `request.state.caller`."""

    def __init__(self, app: ASGIApp, front: Callable[[], Front]) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN:
            await self._app(scope, receive, send)
            return
        front = self._front()
        try:
            caller = front.keyring.caller(Headers(scope=scope).get("authorization", ""))
        except Unauthenticated as error:
            answer = problem(error)
            front.metrics.rejected.labels(str(answer.status)).inc()
            await JSONResponse(answer.body, answer.status, answer.headers)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, send)
