"""What stands between a coordinator and a service: a TCP relay that can be slow or cut, and a gRPC relay behind which
messages get lost or come twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from outrider.rpc.options import channel_options, server_options

_CHUNK = 65_536
_RESULTS = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError)


class Wire:
    """One link's way. Its port stays the same whatever happens behind it.

    Attributes:
        port: where the coordinator connects to.
        delay_s: how long each piece of data is held up, in both directions.
    """

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        self._direct = self._upstream = upstream
        self._loss = _Loss(upstream)
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens on a free port."""
        await self._loss.start()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await self._loss.close()

    def cut(self) -> None:
        """Ends all connections."""
        for end in list(self._ends):
            end.transport.abort()

    def spoil(self, *, lost: float = 0.0, doubled: float = 0.0, seed: int = 0) -> None:
        """From the next connection on, this share of messages gets lost or comes twice; ends those that there are."""
        self._loss.lost, self._loss.doubled, self._loss.dice = lost, doubled, random.Random(seed)
        self._upstream = self._loss.port
        self.cut()

    def mend(self) -> None:
        """No more faults from now on, on the same connections."""
        self.delay_s = self._loss.lost = self._loss.doubled = 0.0
        self._upstream = self._direct

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        self._ends |= {writer, back}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, back))
                group.create_task(self._pass_on(there, writer))
        except* (OSError, EOFError):
            pass
        finally:
            self._ends -= {writer, back}
            writer.transport.abort()
            back.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            sink.write(data)
            await sink.drain()
        raise EOFError


class _Loss(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A gRPC server that passes every call on, message by message; the first message of a call always gets through."""

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.lost = self.doubled = 0.0
        self.dice = random.Random(0)
        self._upstream = upstream

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._upstream}", options=channel_options())
        self._server = grpc.aio.server(options=server_options())
        self._server.add_generic_rpc_handlers((self,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(partial(self._relay, details.method))

    async def _relay(self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        call = self._channel.stream_stream(method)()
        sending = asyncio.ensure_future(self._send(requests, call))
        try:
            is_first = True
            while (message := await call.read()) is not grpc.aio.EOF:
                for copy in self._copies(message, is_first=is_first):
                    await context.write(copy)
                is_first = False
            code, words = await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            code, words = error.code(), error.details()
        finally:
            sending.cancel()
            call.cancel()
        if code is not grpc.StatusCode.OK:
            await context.abort(code, words)

    async def _send(self, requests: AsyncIterator[bytes], call: Any) -> None:
        is_first = True
        with contextlib.suppress(*_RESULTS):
            async for message in requests:
                for copy in self._copies(message, is_first=is_first):
                    await call.write(copy)
                is_first = False
            await call.done_writing()

    def _copies(self, message: bytes, *, is_first: bool) -> list[bytes]:
        if is_first:
            return [message]
        drawn = self.dice.random()
        if drawn < self.lost:
            return []
        return [message] * (2 if drawn < self.lost + self.doubled else 1)
