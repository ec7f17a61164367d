"""One link as the service sees it: credit, replies from the engine thread, and the writer that sends them.

`Link.reply` belongs to the engine thread, everything else to the event loop. At most `credit` items of a link are
unanswered; what comes on top is answered RESOURCE_EXHAUSTED at once. So the queue towards the engine and the one
towards a slow coordinator are bounded too.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import grpc
import numpy as np

from outrider.errors import OutriderError, Overloaded
from outrider.rpc.codec import Limits, Request
from outrider.rpc.hello import Hello
from outrider.rpc.merge import merge
from outrider.rpc.options import IDLE_BATCH_INTERVAL_S
from outrider.rpc.stream_trace import StreamTraces
from outrider.seam import Items, Replies

logger = logging.getLogger(__name__)


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


class Link(Generic[R]):
    """One link. `reply` belongs to the engine thread, everything else to the event loop."""

    def __init__(self, kind: LinkKind[Any, R], hello: Hello, credit: int, traces: StreamTraces | None = None) -> None:
        self.owner = hello.coordinator_id
        self.epoch = hello.epoch
        self.ending = asyncio.Event()
        self.open_streams: set[int] = set()
        self.unanswered = 0
        self.traces = traces
        self._kind = kind
        self._credit = credit
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._finished: list[tuple[R, int]] = []
        self._farewell = False
        self._wake = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether the coordinator has no stream and no unanswered item here."""
        return not self.open_streams and not self.unanswered

    def say_draining(self) -> None:
        """Tells the coordinator that the service is about to end."""
        self._farewell = True
        self._wake.set()

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
            if self._farewell:
                self._farewell = False
                await context.write(self._kind.response(draining=True))
            with self._lock:
                finished, self._finished = self._finished, []
            if not finished:
                continue
            self.unanswered -= sum(answered for _, answered in finished)
            if self.traces is not None:
                for batch, _ in finished:
                    self.traces.answered(batch)
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
