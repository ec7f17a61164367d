"""Outbox: what waits to leave on a link, and which streams have an item on its way."""

from __future__ import annotations

import asyncio
from typing import Generic

from coordinator.links import Row

_MOST_CLOSED = 65_536
"""Ids of closed streams kept while a service is away; it drops them by itself when the lease ends."""


class Outbox(Generic[Row]):
    """The rows of one link that have not left yet. A stream has a seat from the moment its row leaves to its answer.

    Attributes:
        ready: set when there may be something to collect; whoever collects clears it before.
        seats: streams that may have an item on its way at once.
        closed: ids of ended streams that the service has not been told of.
    """

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.seats = 0
        self.closed: list[int] = []
        self._rows: dict[int, Row] = {}
        self._in_flight: set[int] = set()

    def post(self, stream_id: int, row: Row) -> None:
        """Adds a row; it replaces an unsent one of the same stream."""
        self._rows[stream_id] = row
        self.ready.set()

    def done(self, stream_id: int) -> None:
        """The stream's item was answered; its seat is free."""
        self._in_flight.discard(stream_id)
        if self._rows:
            self.ready.set()

    def withdraw(self, stream_id: int) -> None:
        """Nobody waits for the stream's item any more; it is not sent if it has not left yet."""
        self._rows.pop(stream_id, None)
        self.done(stream_id)

    def close_stream(self, stream_id: int) -> None:
        """The stream has ended: the service is to be told so."""
        self.withdraw(stream_id)
        if len(self.closed) < _MOST_CLOSED:
            self.closed.append(stream_id)
            self.ready.set()

    def collect(self) -> tuple[list[Row], list[int]]:
        """What leaves now: the rows that have a seat, and all closed ids."""
        leaving = list(self._rows)
        if len(self._in_flight) + len(leaving) > self.seats:
            free = self.seats - len(self._in_flight)
            seated = [stream_id for stream_id in leaving if stream_id in self._in_flight]
            leaving = seated + [stream_id for stream_id in leaving if stream_id not in self._in_flight][: max(free, 0)]
        self._in_flight.update(leaving)
        rows = [self._rows.pop(stream_id) for stream_id in leaving]
        closed, self.closed = self.closed, []
        return rows, closed

    def clear(self) -> None:
        """The link went down, and every item with it; what has ended is still to be told."""
        self._rows.clear()
        self._in_flight.clear()
