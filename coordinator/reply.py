"""The HTTP response to one request: decodes while it is being sent, and stops decoding when the client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.answer import Answer, Piece
from coordinator.frames import DONE, Writer, event
from coordinator.front import Front
from coordinator.openai import Shape
from coordinator.pacing import Pacer, padded
from coordinator.problems import Problem, problem
from coordinator.query import Query
from outrider.errors import OutriderError

logger = logging.getLogger(__name__)

IGNORED_HEADER = "x-outrider-ignored-fields"
REQUEST_ID_HEADER = "x-request-id"
_LONGEST_HEADER = 1_000
PING_S = 10.0
"""A stream says something at least so often: clients and proxies take a connection without a byte for a dead one."""
_PING = b": ping\n\n"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


def request_id(given: str | None) -> str:
    """The client's own id of a request, if it is fit to stand in headers and logs, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class Reply(Response):
    """An ASGI response that makes its status, headers and body as it goes.

    The first piece is awaited before anything is sent, so that whatever fails before it has its own status. An error
    behind it is a frame of the stream. One that waits for long, in the queue or for a target, begins with comments.
    """

    def __init__(self, front: Front, query: Query, shape: Shape) -> None:
        super().__init__()
        self._front = front
        self._query = query
        self._shape = shape
        self._extra_headers = {REQUEST_ID_HEADER: query.request_id, **_ignored_header(shape.ignored)}
        self._started = False
        self._ended = False
        self._sent_s = time.monotonic()
        # Pings are sent beside the answer; messages must not interleave.
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_client_gone(receive))
        pinging = asyncio.ensure_future(self._ping(send))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone, pinging):
                task.cancel()
            # Whatever the client did, decoding has ended and both sides are free when this returns.
            results = await asyncio.gather(work, gone, pinging, return_exceptions=True)
        if isinstance(results[0], asyncio.CancelledError):
            logger.info("the client of request %s went away", self._query.request_id)
        elif isinstance(results[0], BaseException):
            raise results[0]

    async def _work(self, send: Send) -> None:
        try:
            async with self._front.answer(self._query) as answer, aclosing(_iterate(answer)) as pieces:
                writer = Writer(self._shape, self._front.model, answer, self._query.request_id)
                if self._shape.stream:
                    await self._stream(send, pieces, writer)
                else:
                    await self._send_body(send, 200, await _whole(writer, [piece async for piece in pieces]))
        except Exception as error:
            if not isinstance(error, OutriderError):
                logger.exception("request %s failed", self._query.request_id)
            await self._fail(send, problem(error))

    async def _stream(self, send: Send, pieces: AsyncIterator[Piece], writer: Writer) -> None:
        config = self._front.config
        if config.stream_pacing_s:
            await self._stream_paced(
                send, pieces, writer, Pacer(partial(self._send_event, send), config.stream_pacing_s, config.stream_pad)
            )
            return
        async for piece in pieces:
            await self._send_event(send, await _chunk(writer, piece))
        await self._send_event(send, writer.usage_chunk())
        await self._end_stream(send, padded(DONE, config.stream_pad))

    async def _stream_paced(self, send: Send, pieces: AsyncIterator[Piece], writer: Writer, pacer: Pacer) -> None:
        first = await anext(pieces)  # what fails before it has a status of its own
        await self._send_event(send, None)
        async with pacer:
            pacer.put(await _chunk(writer, first))
            async for piece in pieces:
                pacer.put(await _chunk(writer, piece))
            pacer.put(writer.usage_chunk())
            pacer.put(DONE)
        await self._end_stream(send, b"")

    async def _ping(self, send: Send) -> None:
        """Keeps a silent stream alive with comments, which clients skip."""
        while self._shape.stream:
            await asyncio.sleep(max(self._sent_s + PING_S - time.monotonic(), 0.05))
            if not self._ended and time.monotonic() - self._sent_s >= PING_S:
                await self._send_event(send, _PING)

    async def _send_event(self, send: Send, frame: bytes | None) -> None:
        async with self._sending:
            if self._ended:
                return
            if not self._started:
                self._started = True
                # Proxies that buffer would turn the stream into one late answer.
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await _start(send, 200, {**headers, "x-accel-buffering": "no", **self._extra_headers})
            if frame is not None:
                self._sent_s = time.monotonic()
                data = padded(frame, self._front.config.stream_pad)
                await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _end_stream(self, send: Send, frames: bytes) -> None:
        self._ended = True
        async with self._sending:
            await send({"type": "http.response.body", "body": frames})

    async def _fail(self, send: Send, answer: Problem) -> None:
        if self._started:
            await self._end_stream(send, event(answer.body) + DONE)
            return
        self._ended = True
        self._front.metrics.rejected.labels(str(answer.status)).inc()
        await self._send_json(send, answer.status, answer.body, answer.headers)

    async def _send_json(
        self, send: Send, status: int, value: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        await self._send_body(send, status, _dumped(value), headers)

    async def _send_body(self, send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await _start(send, status, {**fixed, **self._extra_headers, **(headers or {})})
        await send({"type": "http.response.body", "body": body})


async def _whole(writer: Writer, pieces: list[Piece]) -> bytes:
    """An answer as JSON. Log-probabilities are written in a thread: thousands of tokens' would hold up all others.

    In none of the front's places: an answer that is there is not refused for want of one.
    """
    if all(piece.logprobs is None and piece.prompt_logprobs is None for piece in pieces):
        return _dumped(writer.whole(pieces))
    return await asyncio.to_thread(lambda: _dumped(writer.whole(pieces)))


async def _chunk(writer: Writer, piece: Piece) -> bytes | None:
    """An event; in a thread where it brings a whole prompt's log-probabilities."""
    if piece.prompt_logprobs is None:
        return writer.chunk(piece)
    return await asyncio.to_thread(writer.chunk, piece)


def _dumped(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


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
