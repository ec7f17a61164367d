"""Bounded admission: a request runs, waits its turn, or is refused at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from outrider.errors import DeadlineExceeded, Overloaded, Unavailable


class Admission:
    """First come, first served.

    Attributes:
        running, waiting: answers being decoded, and queued for it.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.running = 0
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        return sum(count for count, _ in self._queue)

    @property
    def draining(self) -> bool:
        return self._draining

    @asynccontextmanager
    async def slots(self, count: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold `count` places, waiting for at most `timeout_s` seconds.

        Raises:
            Overloaded: as many wait as may wait.
            Unavailable: the server is draining.
            DeadlineExceeded: the time ran out in the queue.
        """
        await self._enter(min(count, self._max_running), timeout_s)
        try:
            yield
        finally:
            self._leave(min(count, self._max_running))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests; True once all others ended, False after `timeout_s` seconds."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def _enter(self, count: int, timeout_s: float) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down")
        if not self._queue and self.running + count <= self._max_running:
            self._take(count)
            return
        if self.waiting + count > self._max_waiting:
            raise Overloaded(f"{self.running} answers are running and {self.waiting} waiting; try again later")
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._idle.clear()
        try:
            await asyncio.wait_for(asyncio.shield(turn), timeout_s)
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # its turn came in the same moment
                self._leave(count)
            else:
                self._queue.remove((count, turn))
                turn.cancel()
                self._admit()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"waited {timeout_s:g} s for a free place") from None
            raise

    def _take(self, count: int) -> None:
        self.running += count
        self._idle.clear()

    def _leave(self, count: int) -> None:
        self.running -= count
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.running + self._queue[0][0] <= self._max_running:
            count, turn = self._queue.popleft()
            self._take(count)
            turn.set_result(None)
        if not self._queue and not self.running:
            self._idle.set()
