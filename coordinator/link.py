"""A link: one long-lived call to one service, reconnected for ever.

What callers `post` in one turn of the event loop leaves as one message; while a message is being written, further rows
gather for the next. A link that ends is opened again with a higher epoch, after 100 ms at first and 1 s at most. A
service that comes back as another instance has lost the streams of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Generic, Protocol

import grpc

from coordinator.config import Resolve
from coordinator.links import LinkKind, Reply, Row
from coordinator.outbox import Outbox
from coordinator.parts import PartInfo, check_versions
from coordinator.service_channel import ServiceChannel
from coordinator.wire import KINDS, count
from outrider.certs.names import authority
from outrider.errors import InvalidArgument, Mismatch, OutriderError, Unavailable
from outrider.rpc.credentials import PLAIN, TlsFiles
from outrider.rpc.errors import from_rpc_error
from outrider.rpc.hello import Hello, HelloReply
from outrider.rpc.options import (
    IDLE_BATCH_INTERVAL_S,
    LEASE_S,
    RECONNECT_BACKOFF_INITIAL_MS,
    RECONNECT_BACKOFF_MAX_MS,
)
from outrider.seam import U32

logger = logging.getLogger(__name__)

_GREETING_TIMEOUT_S = 5.0
_FAREWELL_TIMEOUT_S = 1.0


class Listener(Protocol[Row, Reply]):
    """Whom a link tells what happens; called on the event loop."""

    async def admit(self, link: Link[Row, Reply], info: PartInfo) -> U32:
        """Returns the ids that the service's q must never hold. Raises OutriderError to refuse the service."""

    def up(self, link: Link[Row, Reply], *, new_instance: bool) -> None:
        """Rows are being sent; a new instance knows none of the streams."""

    def received(self, link: Link[Row, Reply], batch: Reply) -> None:
        """A message came. Raises OutriderError if it makes no sense, which ends the call."""

    def down(self, link: Link[Row, Reply], reason: str, *, nonsense: bool) -> None:
        """The call ended, and with it every unanswered item; `nonsense`: because a message could not be understood."""


class Link(Generic[Row, Reply]):
    """One service, as long as the coordinator lives.

    With `resolve`, `address` is a name that is looked up before each attempt to connect: a service that was started
    again elsewhere is found there.

    Attributes:
        info: what the service said of itself when it was last reached.
        is_up: whether rows are being sent.
        is_draining: whether the service has said that it is about to end.
        reason: why they are not, for people.
        round_trip_s: of a call when it was last reached, 0 before.
        changed_s: `time.monotonic()` when the link last went up or down.
        messages_sent, messages_received: messages with at least one item.
    """

    def __init__(
        self,
        kind: LinkKind[Row, Reply],
        address: str,
        coordinator_id: bytes,
        listener: Listener[Row, Reply],
        tls: TlsFiles = PLAIN,
        wire: dict[str, int] | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self.kind = kind
        self.address = address
        self.info: PartInfo | None = None
        self.is_up = self.is_draining = False
        self.reason = f"the {kind.part} service at {address} has not answered yet"
        self.changed_s = time.monotonic()
        self.round_trip_s = 0.0
        self.messages_sent = 0
        self.messages_received = 0
        self._wire = dict.fromkeys(KINDS, 0) if wire is None else wire
        self._peer = f"the {kind.part} service at {address}"
        self._coordinator_id = coordinator_id
        self._listener = listener
        self._channel = ServiceChannel(address, tls, authority(kind.part), resolve)
        self._call: Any = None
        self._epoch = 0
        self._instance_id = ""
        self._restart_reason = ""
        self._task: asyncio.Task[None] | None = None
        self._outbox = Outbox[Row]()

    # ---- rows ----

    def post(self, stream_id: int, row: Row) -> None:
        """Sends a row with the next message; replaces an unsent one of the same stream."""
        self._outbox.post(stream_id, row)

    def done(self, stream_id: int) -> None:
        """The stream's item was answered; its seat is free."""
        self._outbox.done(stream_id)

    def withdraw(self, stream_id: int) -> None:
        """Nobody waits for the stream's item any more; it is not sent if it has not left yet."""
        self._outbox.withdraw(stream_id)

    def close_stream(self, stream_id: int) -> None:
        """Tells the service that the stream has ended, with the next message or after the next connect."""
        self._outbox.close_stream(stream_id)

    # ---- life ----

    def start(self) -> None:
        """Starts connecting; needs a running event loop."""
        self._channel.start()
        self._task = asyncio.create_task(self._run(), name=f"link to {self._peer}")

    async def close(self) -> None:
        """Says which streams have ended, then ends the link."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._channel.drop()

    def restart(self, reason: str) -> None:
        """Ends the present call and connects anew."""
        if self._call is not None:
            self._restart_reason = reason
            self._call.cancel()

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The service's tokenizer, file name -> content; empty where it has none.

        Raises:
            OutriderError: the service cannot be reached.
        """
        if self._channel.present is None:
            raise Unavailable(f"{self._peer}: the link has not been started")
        try:
            return await self.kind.tokenizer_files(self._channel.present)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, self._peer) from error

    async def refresh(self) -> None:
        """Asks the service again what it is; what cannot be had now stays as it was."""
        if self._channel.present is None:
            return
        with contextlib.suppress(grpc.aio.AioRpcError):
            info = await self.kind.describe(self._channel.present)
            if self.is_up and self.info is not None and info.instance_id == self.info.instance_id:
                self.info = info

    async def _run(self) -> None:
        pause_ms = RECONNECT_BACKOFF_INITIAL_MS
        while True:
            was_up = nonsense = refused = unreached = False
            try:
                await self._connect(await self._channel.find())
                was_up = True
                await self._pump()
                reason = "the link ended"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                # gRPC goes on trying the address that a name had, and asks for a name that was gone less and less
                # often, up to every two minutes: a restarted container would be found late. A new channel asks at once.
                unreached = not was_up
            except InvalidArgument as error:
                reason, nonsense = f"a message that makes no sense: {error}", was_up
            except OutriderError as error:
                reason, refused = str(error), isinstance(error, Mismatch)
            except TimeoutError:
                reason = "no answer in time"
            except asyncio.InvalidStateError:
                reason = "the link ended"
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                reason = "the call was cancelled"
            except Exception:
                logger.exception("%s: the coordinator failed on a message", self._peer)
                reason = "the coordinator failed on a message; its log has the trace"
            finally:
                if self._call is not None:
                    self._call.cancel()
                    self._call = None
            self._went_down(f"{self._peer}: {self._restart_reason or reason}", nonsense=nonsense, refused=refused)
            if unreached:
                await self._channel.drop()
            pause_ms = RECONNECT_BACKOFF_INITIAL_MS if was_up else min(2 * pause_ms, RECONNECT_BACKOFF_MAX_MS)
            await asyncio.sleep(pause_ms / 1_000)

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        info = await self.kind.describe(channel)
        check_versions(self.kind.part, info)
        self.info = info
        excluded = await self._listener.admit(self, info)
        self._epoch += 1
        self._call = self.kind.call(channel)
        hello = Hello(coordinator_id=self._coordinator_id, epoch=self._epoch, excluded_ids=excluded)
        async with asyncio.timeout(_GREETING_TIMEOUT_S):
            reply = await self.kind.greet(self._call, hello)
        began_s = time.monotonic()
        await self.kind.describe(channel)
        self.round_trip_s = time.monotonic() - began_s
        self._went_up(reply)

    def _went_up(self, reply: HelloReply) -> None:
        new_instance = reply.instance_id != self._instance_id
        if new_instance:
            self._outbox.closed.clear()
        self._instance_id = reply.instance_id
        # A plain run that is topped up takes credit twice for a moment; half as many streams as credit is always safe.
        self._outbox.seats = max(1, reply.credit // 2)
        self.is_up, self.reason, self.changed_s = True, "", time.monotonic()
        self.is_draining = False
        logger.info("%s: link up, epoch %d", self._peer, self._epoch)
        self._listener.up(self, new_instance=new_instance)
        self._outbox.ready.set()

    def _went_down(self, reason: str, *, nonsense: bool, refused: bool) -> None:
        if reason != self.reason:
            # A service that is not there yet is nothing to warn of; one that was, or that does not fit, is.
            logger.log(logging.WARNING if self.is_up or refused else logging.INFO, "%s", reason)
        was_up, self.is_up, self.reason, self._restart_reason = self.is_up, False, reason, ""
        self._outbox.clear()
        if was_up:
            self.changed_s = time.monotonic()
            self._listener.down(self, reason, nonsense=nonsense)

    async def _pump(self) -> None:
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if (current := asyncio.current_task()) is not None and current.cancelling():
                await self._farewell()

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(LEASE_S):
                message = await self._call.read()
            if message is grpc.aio.EOF:
                code = await self._call.code()
                raise Unavailable(await self._call.details() or f"the link ended with {code.name}")
            count(message, self._wire)
            self.is_draining |= message.draining
            batch = self.kind.read(message)
            if len(batch.replies):
                self.messages_received += 1
                self._listener.received(self, batch)

    async def _write(self) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_BATCH_INTERVAL_S):
                    await self._outbox.ready.wait()
            except TimeoutError:
                await self._call.write(self.kind.request())
                continue
            self._outbox.ready.clear()
            rows, closed = self._outbox.collect()
            if rows or closed:
                self.messages_sent += bool(rows)
                message = self.kind.write(rows, closed)
                count(message, self._wire)
                await self._call.write(message)

    async def _farewell(self) -> None:
        """Says which streams have ended, so that their KV need not wait for the end of the lease."""
        if self._outbox.closed:
            try:
                async with asyncio.timeout(_FAREWELL_TIMEOUT_S):
                    await self._call.write(self.kind.write([], self._outbox.closed))
                    await self._call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                logger.debug("%s: gone before the farewell", self._peer)
