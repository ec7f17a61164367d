"""Bounded admission: a request runs, waits its turn, or is refused at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from coordinator.fair_queue import FairQueue
from outrider.errors import DeadlineExceeded, Overloaded, Unavailable

_LEAST_RETRY_S = 1.0
_MOST_RETRY_S = 60.0
_SHUTTING_DOWN = "the server is shutting down"
_NEW_SHARE = 0.1
"""Weight of the last place that came free in the mean time between two."""


class Admission:
    """Clients take turns; each client's own requests go in order of arrival.

    Attributes:
        running: places that are taken.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        """
        Args:
            max_running: places.
            max_waiting: places that the waiting requests of one client ask for at most.
        """
        self.running = 0
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._queue = FairQueue[asyncio.Future[int]]()
        self._place_s: float | None = None
        self._freed_s: float | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """Places that are waited for."""
        return self._queue.size

    def resize(self, max_running: int, max_waiting: int) -> None:
        """Other numbers from now on; what runs or waits already goes on."""
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._admit()

    def check(self, client: str, count: int) -> None:
        """
        Raises:
            Overloaded: a request of this client for so many places would be refused now.
            Unavailable: the server is draining.
        """
        if self._draining:
            raise Unavailable(_SHUTTING_DOWN)
        count, waiting = min(count, self._max_running), self._queue.size_of(client)
        if not self._is_free(count) and waiting + count > self._max_waiting:
            whose = f"of the API key {client!r}" if client else "that"
            raise Overloaded(
                f"{self.running} answers are running, and {waiting} {whose} are waiting of at most "
                f"{self._max_waiting}; try again later",
                retry_after_s=self._retry_after_s(count),
            )

    @asynccontextmanager
    async def slots(self, client: str, count: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold `count` places (all there are, if it is more), waiting for at most `timeout_s` seconds.

        Raises:
            Overloaded: as much of this client waits as may wait.
            Unavailable: the server is draining.
            DeadlineExceeded: the time ran out in the queue.
        """
        taken = await self._enter(client, count, timeout_s)
        try:
            yield
        finally:
            self._leave(taken)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; True once all others ended, False after `timeout_s` seconds."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Refuse what waits as well; what runs is for others to end."""
        self._draining = True
        while self._queue:
            self._queue.take().item.set_exception(Unavailable(_SHUTTING_DOWN))
        self._admit()

    async def _enter(self, client: str, count: int, timeout_s: float) -> int:
        """Returns the places that were taken, once they are."""
        self.check(client, count)
        count = min(count, self._max_running)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Through the queue also where there is room, so that it knows who had places before others had to wait.
        entry = self._queue.put(client, count, turn)
        self._idle.clear()
        self._admit()
        if turn.done():
            return turn.result()
        try:
            # Not `wait_for`: on Python 3.11 it forgets that it was cancelled where the turn came in the same moment.
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(turn)
        except BaseException as error:
            if not turn.done():
                self._queue.remove(entry)
                turn.cancel()
                self._admit()
            elif turn.exception() is None:  # its turn came in the same moment
                self._leave(turn.result())
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"waited {timeout_s:g} s for a free place") from None
            raise

    def _is_free(self, count: int) -> bool:
        """Whether so many places can be had without passing anybody by."""
        return not self._queue and self.running + count <= self._max_running

    def _leave(self, count: int) -> None:
        now_s = time.monotonic()
        if self._freed_s is not None:
            place_s = (now_s - self._freed_s) / count
            self._place_s = place_s if self._place_s is None else self._place_s + _NEW_SHARE * (place_s - self._place_s)
        self.running -= count
        self._admit()
        # How often a place comes free is known while all are wanted only.
        self._freed_s = now_s if self._queue else None

    def _retry_after_s(self, count: int) -> float:
        """Until `count` places have come free for one client, where all that wait take turns."""
        expected_s = count * self._queue.clients * (self._place_s or 0.0)
        return min(max(expected_s, _LEAST_RETRY_S), _MOST_RETRY_S)

    def _admit(self) -> None:
        while entry := self._queue.next():
            count = min(entry.size, self._max_running)  # there may be fewer by now
            if self.running + count > self._max_running:
                return
            self._queue.take()
            self.running += count
            entry.item.set_result(count)
        if not self.running:
            self._queue.forget()
            self._idle.set()
