"""The service side of links: each is one long-lived call of one coordinator, carrying all its streams.

Everything here runs on the event loop and computes nothing. Messages go to the engine through `submit`, which is
thread-safe and never blocks; answers come back through `Link.reply`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic

import grpc

from outrider.certs.names import authority
from outrider.errors import InvalidArgument, Preempted, Unavailable
from outrider.rpc.codec import Limits
from outrider.rpc.credentials import check_client
from outrider.rpc.hello import Hello, HelloReply, hello_from_pb, hello_reply_to_pb, negotiate
from outrider.rpc.options import LEASE_S
from outrider.rpc.session import B, Link, LinkKind, R
from outrider.rpc.stream_trace import StreamTraces
from outrider.seam import U32
from outrider.tracing import Tracer

__all__ = ["Attached", "Delivery", "Detached", "Link", "LinkHost", "LinkKind"]

logger = logging.getLogger(__name__)

_ITEMS_PER_MESSAGE = 4
"""A message may hold this many times the credit; the excess is answered politely instead of ending the link."""

_DRAIN_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """To the engine: a coordinator's link is up; streams that it left under its lease are its own again."""

    owner: bytes
    epoch: int
    excluded_ids: U32


@dataclass(frozen=True, slots=True, kw_only=True)
class Detached:
    """To the engine: a coordinator's link ended; free its streams unless it is back within the lease."""

    owner: bytes
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery(Generic[B, R]):
    """To the engine: a request batch.

    Attributes:
        owner: identity of the coordinator.
        epoch: of its link; a delivery of an older one is dropped.
        link: where to answer; every item that is not in `refused` must be answered, once `Link.reply` says so.
        batch: as received.
        refused: indices of items that the link has answered itself; skip them.
        arrived_s: `time.monotonic()` at arrival.
    """

    owner: bytes
    epoch: int
    link: Link[R]
    batch: B
    refused: frozenset[int]
    arrived_s: float


class LinkHost(Generic[B, R]):
    """All links of one service: greetings, epochs, leases and draining.

    Attributes:
        tracer: begins the spans of traced streams; None where nothing is traced.
    """

    def __init__(
        self,
        kind: LinkKind[B, R],
        submit: Callable[[Any], None],
        *,
        instance_id: str,
        credit: int,
        max_slots: int,
        lease_s: float = LEASE_S,
    ) -> None:
        """
        Args:
            kind: codec of this service's messages.
            submit: takes `Attached`, `Delivery` and `Detached` to the engine thread, without blocking.
            instance_id: identity of the process.
            credit: unanswered items per link.
            max_slots: drafted slots per item.
            lease_s: how long a lost link's streams are kept.
        """
        self._kind = kind
        self._submit = submit
        self._instance_id = instance_id
        self._credit = credit
        self._lease_s = lease_s
        self._limits = Limits(_ITEMS_PER_MESSAGE * credit, max_slots)
        self._links: dict[bytes, Link[R]] = {}
        self._ended: dict[bytes, tuple[int, float]] = {}
        self._draining = asyncio.Event()
        self._refusal = ""
        self.tracer: Tracer | None = None

    async def serve(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        """The whole life of one link; the body of the streaming RPC.

        Raises:
            OutriderError: the link ends with this error's status.
        """
        check_client(context, authority("coordinator"))
        hello, version = await self._greet(requests)
        traces = None if self.tracer is None else StreamTraces(self.tracer)
        link = Link(self._kind, hello, self._credit, traces)
        if previous := self._links.get(link.owner):
            previous.ending.set()
        self._links[link.owner] = link
        self._submit(Attached(owner=link.owner, epoch=link.epoch, excluded_ids=hello.excluded_ids))
        logger.info("link from coordinator %s: epoch %d", link.owner.hex()[:8], link.epoch)
        try:
            reply = HelloReply(
                instance_id=self._instance_id,
                lease_ms=round(self._lease_s * 1_000),
                credit=self._credit,
                protocol_version=version,
            )
            await context.write(self._kind.response(hello=hello_reply_to_pb(reply)))
            await self._pump(link, requests, context)
        finally:
            self._end(link)

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def refuse(self, reason: str) -> None:
        """End all links and let none begin, until `resume`: whoever has another replica goes there."""
        self._refusal = reason
        for link in self._links.values():
            link.ending.set()

    def resume(self) -> None:
        """Links are welcome again."""
        self._refusal = ""

    async def drain(self, grace_s: float) -> None:
        """Refuse new links, let the present ones finish their streams for up to `grace_s`, then end them.

        Coordinators are told, so that those with another replica begin no more streams here.
        """
        self._refusal = "draining"
        self._draining.set()
        for link in self._links.values():
            link.say_draining()
        for _ in range(math.ceil(grace_s / _DRAIN_POLL_S)):
            if all(link.idle for link in self._links.values()):
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        for link in self._links.values():
            link.ending.set()

    async def _greet(self, requests: AsyncIterator[Any]) -> tuple[Hello, int]:
        if self._refusal:
            raise Unavailable(self._refusal)
        async for message in requests:
            if not message.HasField("hello"):
                raise InvalidArgument("hello", "must be set in the first message of a link")
            hello = hello_from_pb(message.hello)
            version = negotiate("coordinator", hello.protocol_min, hello.protocol_max)
            self._check_epoch(hello)
            return hello, version
        raise InvalidArgument("hello", "the link ended before it was sent")

    def _check_epoch(self, hello: Hello) -> None:
        now = time.monotonic()
        self._ended = {owner: (epoch, until) for owner, (epoch, until) in self._ended.items() if until > now}
        current = self._links.get(hello.coordinator_id)
        last = current.epoch if current else self._ended.get(hello.coordinator_id, (-1, now))[0]
        if hello.epoch <= last:
            raise InvalidArgument("link_epoch", f"{hello.epoch} is not above {last}, the last one of this coordinator")

    async def _pump(self, link: Link[R], requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        tasks = [
            asyncio.ensure_future(task)
            for task in (self._read(link, requests), link.write(context), link.ending.wait())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._refusal:
                raise Unavailable(self._refusal)
            if link.ending.is_set():
                raise Preempted("a newer link of the same coordinator took over")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, link: Link[R], requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            if link.ending.is_set():
                return
            request = self._kind.read(message, self._limits)
            batch = request.batch
            if link.traces is not None:
                link.traces.received(batch.opens, batch.closed.tolist())
            if not (len(batch.items) or batch.opens or len(batch.closed)):
                continue
            self._submit(
                Delivery(
                    owner=link.owner,
                    epoch=link.epoch,
                    link=link,
                    batch=batch,
                    refused=link.admit(request),
                    arrived_s=time.monotonic(),
                )
            )

    def _end(self, link: Link[R]) -> None:
        if link.traces is not None:
            link.traces.close()
        if self._links.get(link.owner) is not link:
            return  # a newer link owns the streams
        del self._links[link.owner]
        self._ended[link.owner] = (link.epoch, time.monotonic() + self._lease_s)
        with contextlib.suppress(Unavailable):  # the engine may have stopped before its links
            self._submit(Detached(owner=link.owner, epoch=link.epoch))
        logger.info("link from coordinator %s ended", link.owner.hex()[:8])
