"""The HTTP response to one request: decodes while it is being sent, and stops decoding when the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.answer import Answer, Piece
from coordinator.frames import DONE, Writer, event
from coordinator.front import Front
from coordinator.openai import Shape
from coordinator.problems import Problem, problem
from coordinator.query import Query
from outrider.errors import OutriderError

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-outrider-ignored-fields"
_LONGEST_HEADER = 1_000


class Reply(Response):
    """An ASGI response that makes its status, headers and body as it goes.

    The first piece is awaited before anything is sent, so that whatever fails before it has its own status. An error
    behind it is a frame of the stream.
    """

    def __init__(self, front: Front, query: Query, shape: Shape) -> None:
        super().__init__()
        self._front = front
        self._query = query
        self._shape = shape
        self._extra_headers = _ignored_header(shape.ignored)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_client_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            # Whatever the client did, decoding has ended and both sides are free when this returns.
            results = await asyncio.gather(work, gone, return_exceptions=True)
        if isinstance(results[0], asyncio.CancelledError):
            logger.info("the client went away")
        elif isinstance(results[0], BaseException):
            raise results[0]

    async def _work(self, send: Send) -> None:
        try:
            async with self._front.answer(self._query) as answer, aclosing(_iterate(answer)) as pieces:
                writer = Writer(self._shape, self._front.model, answer)
                if self._shape.stream:
                    await self._stream(send, pieces, writer)
                else:
                    await self._send_json(send, 200, writer.whole([piece async for piece in pieces]))
        except Exception as error:
            if not isinstance(error, OutriderError):
                logger.exception("a request failed")
            await self._fail(send, problem(error))

    async def _stream(self, send: Send, pieces: AsyncIterator[Piece], writer: Writer) -> None:
        async for piece in pieces:
            await self._send_event(send, writer.chunk(piece))
        await self._send_event(send, writer.usage_chunk())
        await send({"type": "http.response.body", "body": DONE})

    async def _send_event(self, send: Send, frame: bytes | None) -> None:
        if not self._started:
            self._started = True
            # Proxies that buffer would turn the stream into one late answer.
            headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
            await _start(send, 200, {**headers, "x-accel-buffering": "no", **self._extra_headers})
        if frame is not None:
            await send({"type": "http.response.body", "body": frame, "more_body": True})

    async def _fail(self, send: Send, answer: Problem) -> None:
        if self._started:
            await send({"type": "http.response.body", "body": event(answer.body) + DONE})
            return
        self._front.metrics.rejected.labels(str(answer.status)).inc()
        await self._send_json(send, answer.status, answer.body, answer.headers)

    async def _send_json(
        self, send: Send, status: int, value: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps(value, separators=(",", ":")).encode()
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await _start(send, status, {**fixed, **self._extra_headers, **(headers or {})})
        await send({"type": "http.response.body", "body": body})


async def _iterate(answer: Answer) -> AsyncGenerator[Piece, None]:
    async for piece in answer:
        yield piece


async def _start(send: Send, status: int, headers: dict[str, str]) -> None:
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _ignored_header(names: tuple[str, ...]) -> dict[str, str]:
    if not names:
        return {}
    # Names are the client's own text: whatever cannot stand in a header is written as an escape.
    printable = [name.encode("unicode_escape").decode("ascii").replace(",", "\\x2c") for name in names]
    return {IGNORED_HEADER: ", ".join(printable)[:_LONGEST_HEADER]}
