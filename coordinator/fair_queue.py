"""A queue in which clients take turns: start-time fair queueing.

[Goyal, Vin and Cheng 1996](https://doi.org/10.1145/248157.248171), with a place in the decoding batch where they have
a bit. Each client's foremost entry has a start tag, max(virtual time, end of the client's last entry), and its end is
start + size. The entry with the smallest start tag is next, and virtual time is the start tag of the last one taken.
For entries of one size that is round-robin; where sizes differ, clients that always have entries waiting get equal
numbers of places, to within one entry of each. A client that comes back gets no credit for the meantime.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Entry(Generic[T]):
    """What waits.

    Attributes:
        size: places that it takes.
    """

    client: str
    size: int
    item: T


@dataclass(slots=True)
class _Line(Generic[T]):
    """One client's entries, and the tag and order of the foremost."""

    entries: deque[Entry[T]] = field(default_factory=deque)
    size: int = 0
    start: int = 0
    turn: int = 0


class FairQueue(Generic[T]):
    """Knows no clock, no limit and no task.

    Attributes:
        size: places that all entries take together.
    """

    def __init__(self) -> None:
        self.size = 0
        self._lines: dict[str, _Line[T]] = {}
        self._ends: dict[str, int] = {}
        self._now = 0
        self._turns = count()

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def clients(self) -> int:
        """Clients that have entries."""
        return len(self._lines)

    def size_of(self, client: str) -> int:
        """Places that a client's entries take together."""
        line = self._lines.get(client)
        return 0 if line is None else line.size

    def put(self, client: str, size: int, item: T) -> Entry[T]:
        """Behind the client's other entries."""
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = _Line(start=max(self._now, self._ends.get(client, 0)), turn=next(self._turns))
        entry = Entry(client, size, item)
        line.entries.append(entry)
        line.size += size
        self.size += size
        return entry

    def next(self) -> Entry[T] | None:
        """The entry whose turn it is. It stays so, however small others are: a large one is never starved."""
        if not self._lines:
            return None
        return min(self._lines.values(), key=lambda line: (line.start, line.turn)).entries[0]

    def take(self) -> Entry[T]:
        """Takes out the entry whose turn it is; there must be one."""
        entry = self.next()
        assert entry is not None
        line = self._lines[entry.client]
        self._now = line.start
        end = self._ends[entry.client] = line.start + entry.size
        self._drop(line, entry)
        if line.entries:
            line.start, line.turn = end, next(self._turns)
        return entry

    def forget(self) -> None:
        """Nobody waits and nothing that was taken is still at work: all begin anew, on equal terms."""
        self._ends.clear()
        self._now = 0

    def remove(self, entry: Entry[T]) -> None:
        """Takes out an entry that waits no longer; the next of its client comes in its turn."""
        self._drop(self._lines[entry.client], entry)

    def _drop(self, line: _Line[T], entry: Entry[T]) -> None:
        line.entries.remove(entry)
        line.size -= entry.size
        self.size -= entry.size
        if not line.entries:
            del self._lines[entry.client]
