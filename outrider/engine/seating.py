"""Seating: who rides in a step that starts now, given its seats, its rows and the KV pool.

The oldest streams make progress whatever happens. When an admitted stream cannot grow, the youngest one loses its
blocks and is computed again from the start when there is room. A stream loses them to others once: it comes back only
if everything that it and its like can ever hold fits into the pool together, and streams that never gave way go first.
A new stream is admitted in its turn and never at another's cost.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outrider.engine.chunk import ChunkSize
from outrider.engine.formation import Formation, Piece, Pool, Work
from outrider.engine.roster import Entry, Roster

log = logging.getLogger(__name__)

_SCORED_ROWS = 256
"""Rows of prompts in one step at most whose logits are wanted: a row of logits is as long as the vocabulary."""


class Seating:
    """Fills steps.

    Args:
        pool: KV room.
        roster: all streams.
        chunk: how much of prompts goes into a step.
        seats: streams in a step at most.
        budget: rows in a step at most.

    Attributes:
        preemptions: how often a stream lost its blocks.
    """

    def __init__(self, pool: Pool, roster: Roster, chunk: ChunkSize, *, seats: int, budget: int) -> None:
        self._pool = pool
        self._roster = roster
        self._chunk = chunk
        self._seats = seats
        self._budget = budget
        self.preemptions = 0

    def fill(self, ready: Sequence[tuple[int, Entry]], coming_rows: int) -> Formation:
        """The step.

        Args:
            ready: streams with work, in the order of their turns.
            coming_rows: rows of streams on their way, which wait while this step runs.
        """
        decoding = sum(entry.work.tail for _, entry in ready if entry.work is not None and not entry.work.prefilling)
        rows_left = prompt_left = self._budget
        reading = any(entry.work.prefilling for _, entry in ready if entry.work is not None)
        if reading and (decoding or coming_rows):
            prompt_left = min(self._chunk.rows(decoding, coming_rows, self._budget), self._budget // 2)
        scored_left = _SCORED_ROWS
        pieces: list[Piece] = []
        refused: list[int] = []
        riding: set[int] = set()
        admitting = True
        for stream_id, entry in ready:
            if entry.work is None or len(pieces) == self._seats or not rows_left:
                continue
            if not self._pool.fits(entry.work.tokens):
                refused.append(stream_id)
                continue
            if not entry.admitted:
                if not admitting or not self._may_come_back(entry) or self._waits_for_prompt(entry):
                    continue
                if entry.work.prefilling and not prompt_left:
                    continue
                if not (admitting := self._admit(stream_id, entry, entry.work)):
                    continue
            work = entry.work
            rows = work.rows
            if work.prefilling:
                room = min(rows_left, prompt_left, scored_left if work.scored else rows_left)
                rows = work.rows if work.rows <= room else min(room, work.rows - work.tail)
            if not 0 < rows <= rows_left or not self._make_room(stream_id, entry, work, riding):
                continue
            pieces.append(Piece(stream_id, rows, rows == work.rows))
            riding.add(stream_id)
            rows_left -= rows
            if work.prefilling:
                prompt_left -= rows
                scored_left -= rows if work.scored else 0
        for stream_id in refused:
            del self._roster[stream_id]
        return Formation(tuple(pieces), None, tuple(refused))

    def _admit(self, stream_id: int, entry: Entry, work: Work) -> bool:
        """Room for a new stream, leaving a block for each admitted one to grow into."""
        others = sum(other.admitted for other in self._roster.values())
        found = self._pool.admit(stream_id, work, spare_blocks=others)
        if found is None:
            return False
        entry.admitted, entry.work = True, work.after(found)
        return True

    def _may_come_back(self, entry: Entry) -> bool:
        """Whether a stream that lost its blocks will not have to give way again."""
        safe = [other.most for other in self._roster.values() if other.admitted and other.evicted]
        return not entry.evicted or not safe or self._pool.fits(*safe, entry.most)

    def _waits_for_prompt(self, entry: Entry) -> bool:
        """Whether the prompt that a new stream shares is still being read; it finds more of it when that is over."""
        parent = None if entry.fork_of is None else self._roster.get(entry.fork_of)
        return parent is not None and parent.work is not None and not parent.served

    def _make_room(self, stream_id: int, entry: Entry, work: Work, riding: set[int]) -> bool:
        """Room for an admitted stream at the cost of the youngest; False if it must wait or was itself the youngest."""
        while not self._pool.grow(stream_id, work.tokens, spare_blocks=0):
            victim_id, victim = self._youngest()
            if victim_id in riding:
                return False
            self._evict(victim_id, victim)
            if victim is entry:
                return False
        return True

    def _youngest(self) -> tuple[int, Entry]:
        """The stream that gives way: the youngest of those that never have."""
        admitted = [pair for pair in self._roster.items() if pair[1].admitted]
        fresh = [pair for pair in admitted if not pair[1].evicted]
        return max(fresh or admitted, key=lambda pair: pair[1].order)

    def _evict(self, stream_id: int, entry: Entry) -> None:
        self._pool.release(stream_id)
        entry.admitted, entry.evicted = False, True
        if entry.work is not None:
            entry.work = entry.work.anew()
        self.preemptions += 1
        log.info("stream %016x loses its KV: the pool is full", stream_id)
