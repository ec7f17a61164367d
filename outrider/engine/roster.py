"""Roster: what the scheduler notes of each stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.engine.formation import Work


@dataclass(slots=True)
class Entry:
    """One stream.

    Attributes:
        order: of opening; the stream with the highest is the youngest.
        owner: its coordinator.
        fork_of: stream whose prompt it shares, or None.
        admitted: whether it holds KV blocks for its whole item.
        served: whether an item of it has been computed to its end, so that its prompt has been read.
        evicted: whether it has lost its blocks to an older stream. That happens to a stream once.
        work: its outstanding item.
        arrived: order of arrival of the work, over all streams; 0 before the first.
        gamma: slots of the last item answered.
        answered_s: when it was answered; None while work is here and before the first answer.
        most: tokens that it can ever hold, as far as it is known.
    """

    order: int
    owner: bytes = b""
    fork_of: int | None = None
    admitted: bool = False
    served: bool = False
    evicted: bool = False
    work: Work | None = None
    arrived: int = 0
    gamma: int = 0
    answered_s: float | None = None
    most: int = 0

    def take(self, work: Work) -> None:
        """An item is here."""
        self.work = work
        self.most = max(work.most, work.tokens)


Roster = dict[int, Entry]


def in_turns(entries: Iterable[tuple[int, Entry]]) -> list[tuple[int, Entry]]:
    """The entries in order of arrival, coordinators taking turns: the oldest of each, then the second oldest, ...

    So one that sends much makes another wait for one item of its own at most.
    """
    by_arrival = sorted(entries, key=lambda pair: pair[1].arrived)
    if len({entry.owner for _, entry in by_arrival}) <= 1:
        return by_arrival
    seen: Counter[bytes] = Counter()
    turns = []
    for pair in by_arrival:
        turns.append(seen[pair[1].owner])
        seen[pair[1].owner] += 1
    return [pair for _, pair in sorted(zip(turns, by_arrival, strict=True), key=lambda ranked: ranked[0])]
