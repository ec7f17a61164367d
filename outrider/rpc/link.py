"""The service side of a link: one long-lived call of one coordinator, carrying all its streams.

Threads: everything here runs on the event loop except `Link.reply`, which the engine thread calls. Deliveries go to the
engine through `submit` (thread-safe, never blocks); the event loop itself computes nothing.

Bounds: at most `credit` items of a link are unanswered; what comes on top is answered RESOURCE_EXHAUSTED at once. So
queues towards the engine and towards a slow coordinator are bounded too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import grpc
import numpy as np

from outrider.errors import InvalidArgument, OutriderError, Overloaded, Preempted, Unavailable
from outrider.rpc.codec import Limits, Request
from outrider.rpc.hello import Hello, HelloReply, hello_from_pb, hello_reply_to_pb, negotiate
from outrider.rpc.merge import merge
from outrider.rpc.options import IDLE_BATCH_INTERVAL_S, LEASE_S
from outrider.seam import U32, Items, Replies

logger = logging.getLogger(__name__)

_ITEMS_PER_MESSAGE = 4
"""A message may hold this many times the credit; the excess is answered politely instead of ending the link."""

_DRAIN_POLL_S = 0.02


class RequestBatch(Protocol):
    """What `ProposeBatch` and `VerifyBatch` have in common."""

    @property
    def items(self) -> Items: ...
    @property
    def opens(self) -> tuple[Any, ...]: ...
    @property
    def closed(self) -> Any: ...


B = TypeVar("B", bound=RequestBatch)
R = TypeVar("R")


class LinkKind(NamedTuple, Generic[B, R]):
    """What tells the draft's link from the target's.

    Attributes:
        read: request message to batch.
        write: reply batch to message.
        refuse: the reply batch for items that never reached the engine.
        response: the response message class.
    """

    read: Callable[[Any, Limits], Request[Any]]
    write: Callable[[R], Any]
    refuse: Callable[[Replies], R]
    response: Callable[..., Any]


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


class Link(Generic[R]):
    """One link. `reply` belongs to the engine thread, everything else to the event loop."""

    def __init__(self, kind: LinkKind[Any, R], hello: Hello, credit: int) -> None:
        self.owner = hello.coordinator_id
        self.epoch = hello.epoch
        self.ending = asyncio.Event()
        self.open_streams: set[int] = set()
        self.unanswered = 0
        self._kind = kind
        self._credit = credit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._finished: list[tuple[R, int]] = []
        self._wake = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether the coordinator has no stream and no unanswered item here."""
        return not self.open_streams and not self.unanswered

    def reply(self, batch: R, answered: int) -> None:
        """Send a reply batch; called by the engine thread, returns at once. Dropped if the link has ended.

        Args:
            batch: the replies of one step to this link.
            answered: request items that are finished with it and give their credit back (a plain run is one item with
                many replies).
        """
        with self._lock:
            self._finished.append((batch, answered))
            if len(self._finished) > 1:
                return  # a wake-up is already on its way
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            logger.debug("a reply came after the event loop had ended")

    async def write(self, context: grpc.aio.ServicerContext) -> None:
        """Send what the engine has finished, one message per turn; an empty one when there was nothing for a while."""
        while True:
            try:
                async with asyncio.timeout(IDLE_BATCH_INTERVAL_S):
                    await self._wake.wait()
            except TimeoutError:
                await context.write(self._kind.response())
                continue
            self._wake.clear()
            with self._lock:
                finished, self._finished = self._finished, []
            self.unanswered -= sum(answered for _, answered in finished)
            await context.write(self._kind.write(merge([batch for batch, _ in finished])))

    def admit(self, request: Request[Any]) -> frozenset[int]:
        """Take a request's items on credit; answers those that cannot be taken and returns their indices."""
        refused: dict[int, OutriderError] = dict(request.refused)
        items = request.batch.items
        fresh = [index for index in range(len(items)) if index not in refused]
        free = self._credit - self.unanswered
        for index in fresh[free:]:
            refused[index] = Overloaded(f"more than {self._credit} unanswered items on this link")
        self.unanswered += min(len(fresh), free)
        self.open_streams.update(stream.stream_id for stream in request.batch.opens)
        self.open_streams.difference_update(request.batch.closed.tolist())
        if refused:
            self.reply(self._kind.refuse(refusals(items, refused)), 0)
        return frozenset(refused)


class LinkHost(Generic[B, R]):
    """All links of one service: greetings, epochs, leases and draining."""

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

    async def serve(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        """The whole life of one link; the body of the streaming RPC.

        Raises:
            OutriderError: the link ends with this error's status.
        """
        hello, version = await self._greet(requests)
        link = Link(self._kind, hello, self._credit)
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

    async def drain(self, grace_s: float) -> None:
        """Refuse new links, let the present ones finish their streams for up to `grace_s`, then end them."""
        self._draining.set()
        for _ in range(math.ceil(grace_s / _DRAIN_POLL_S)):
            if all(link.idle for link in self._links.values()):
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        for link in self._links.values():
            link.ending.set()

    async def _greet(self, requests: AsyncIterator[Any]) -> tuple[Hello, int]:
        if self._draining.is_set():
            raise Unavailable("draining")
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
            if self._draining.is_set():
                raise Unavailable("draining")
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
        if self._links.get(link.owner) is not link:
            return  # a newer link owns the streams
        del self._links[link.owner]
        self._ended[link.owner] = (link.epoch, time.monotonic() + self._lease_s)
        with contextlib.suppress(Unavailable):  # the engine may have stopped before its links
            self._submit(Detached(owner=link.owner, epoch=link.epoch))
        logger.info("link from coordinator %s ended", link.owner.hex()[:8])


def refusals(items: Items, errors: dict[int, OutriderError]) -> Replies:
    """Replies for items that failed, with their statuses and messages.

    Args:
        items: the request's items.
        errors: item index -> why it failed.
    """
    indices = np.array(sorted(errors), np.intp)
    return Replies(
        stream_ids=items.stream_ids[indices],
        generations=items.generations[indices],
        committed_lengths=items.committed_lengths[indices],
        statuses=np.array([errors[index].status for index in indices.tolist()], np.uint8),
        cached_lengths=np.zeros(len(indices), np.uint32),
        errors={position: str(errors[index]) for position, index in enumerate(indices.tolist())},
    )
