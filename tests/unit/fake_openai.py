"""A scripted OpenAI server in the test's process: fixed delays, frames cut anywhere, and every kind of failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


def frame(text: str, tokens: int | None = None, **choice: Any) -> bytes:
    """One event of a completions stream; with `tokens` it carries the running count."""
    event: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": None, **choice}]}
    if tokens is not None:
        event["usage"] = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    return event_bytes(event)


def usage(tokens: int, **more: Any) -> bytes:
    """The last event before the end."""
    return event_bytes({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": tokens}, **more})


def event_bytes(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


END = b"data: [DONE]\n\n"


@dataclass
class Request:
    """What a script gets: the body, and how to answer."""

    body: dict[str, Any]
    response: web.StreamResponse
    http: web.Request

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            await self.response.write(part)

    async def answer(self, tokens: int = 4, gap_s: float = 0.0) -> None:
        """An ordinary answer, a token a piece."""
        for index in range(tokens):
            last = index == tokens - 1
            await self.send(frame("x", index + 1, finish_reason="length" if last else None))
            if gap_s and not last:
                await asyncio.sleep(gap_s)
        await self.send(usage(tokens), END)


Script = Callable[[Request], Awaitable[None]]


@dataclass
class FakeServer:
    """A running server: what it was asked, and what its `/metrics` say."""

    script: Script
    url: str = ""
    metrics: str = "outrider:num_requests_running 0\noutrider:num_requests_waiting 0\n"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0

    @property
    def prompts(self) -> list[str]:
        return [str(body.get("prompt")) for body in self.bodies]

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.bodies.append(body)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            request = Request(body, response, http)
            if getattr(self.script, "prepares", False):
                await self.script(request)
                return request.response
            await response.prepare(http)
            await self.script(request)
            return response
        finally:
            self.under_way -= 1


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[FakeServer]:
    """The server, on a port of its own."""
    fake = FakeServer(script)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=fake.metrics)

    app = web.Application()
    app.router.add_post("/v1/completions", fake.completions)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()


def failing(status: int, message: str) -> Script:
    """A script that answers every request with an error."""

    async def script(request: Request) -> None:
        request.response = web.json_response({"error": {"message": message, "code": status}}, status=status)

    script.prepares = True  # type: ignore[attr-defined]
    return script
