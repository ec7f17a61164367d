"""Streams: every sequence of a service, who owns it and until when.

A stream ends in one of four ways, and each frees its blocks: its coordinator closes it, its deadline passes, its
coordinator's link stays down for a whole lease, or the service stops.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tokens

from outrider.engine.block_manager import BlockManager
from outrider.engine.counts import Counts
from outrider.engine.grammar import Matcher
from outrider.engine.owners import Owners
from outrider.engine.prefix_index import BlockNames
from outrider.engine.sequence import Sequence
from outrider.engine.sequence_kv import SequenceKV
from outrider.errors import InvalidArgument, Overloaded, UnknownStream
from outrider.grammar import Grammar
from outrider.planted import Plant
from outrider.seam import StreamOpen

log = logging.getLogger(__name__)


class Streams:
    """All streams of a service. Used in the engine thread only.

    Args:
        block_manager: the pool that the streams' blocks come from.
        lease_s: seconds for which the streams of a lost link are kept.
        clock: seconds, monotonic.
        max_streams: streams held at most, ready or not.
        allow_planted_errors: whether streams may ask for errors on purpose.
        matcher: finds the matcher of a stream's grammar; None for a service that does not constrain what it draws.

    Attributes:
        kv: of the streams' sequences.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_streams: int = 4096,
        allow_planted_errors: bool = False,
        matcher: Callable[[Grammar], Matcher | None] | None = None,
    ) -> None:
        self.kv = SequenceKV(block_manager)
        self._block_manager = block_manager
        self._lease_s = lease_s
        self._clock = clock
        self._max_streams = max_streams
        self._allow_planted_errors = allow_planted_errors
        self._matcher = matcher
        self._sequences: dict[int, Sequence] = {}
        self._owners = Owners()
        self._next_end = math.inf

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._sequences

    def get(self, stream_id: int) -> Sequence | None:
        """The sequence of a stream, or None."""
        return self._sequences.get(stream_id)

    def attach(self, owner: bytes, epoch: int) -> None:
        """A coordinator's link came up; its streams of earlier links are found again.

        Raises:
            InvalidArgument: a link of the same or a newer epoch is known already.
        """
        self._owners.attach(owner, epoch)

    def is_current(self, owner: bytes, epoch: int) -> bool:
        """Whether messages of this link count; those of an older epoch are to be dropped."""
        return self._owners.is_current(owner, epoch)

    def detach(self, owner: bytes, epoch: int) -> None:
        """A link went down: the lease begins. Ignored if a newer link took over."""
        if self.is_current(owner, epoch):
            self._owners.lease(owner, self._ends(self._clock() + self._lease_s))

    def open(self, opened: StreamOpen, owner: bytes) -> Sequence:
        """Opens a stream; opened again by its owner it keeps its tokens and KV (the next `sync` cuts what differs).

        A fork starts with the parent's prompt known but not cached; a parent that is gone is no error, since the next
        item's base then asks for the missing tokens. Its KV is shared once it is needed, see `adopt`.

        Raises:
            InvalidArgument: another coordinator owns a stream of this id; or an error is planted in it; or its grammar
                cannot be followed here.
            Overloaded: there are too many streams.
        """
        if opened.planted is not Plant.NONE and not self._allow_planted_errors:
            raise InvalidArgument("planted_error", "this service was not started with --allow-planted-errors")
        deadline = self._ends(self._clock() + opened.deadline_ms / 1000)
        known = self._sequences.get(opened.stream_id)
        if known is not None:
            if known.owner != owner:
                raise InvalidArgument("stream_id", f"{opened.stream_id:016x} belongs to another coordinator")
            known.opened, known.deadline, known.generation = opened, deadline, 0
            known.counts = _counts(opened)
            return known
        if len(self._sequences) >= self._max_streams:
            raise Overloaded(f"{self._max_streams} streams are open, which is the limit")
        manager = self._block_manager
        names = BlockNames(opened.cache_salt, manager.block_size) if manager.reuse else None
        grammar = opened.params.grammar
        matcher = None if grammar is None or self._matcher is None else self._matcher(grammar)
        sequence = Sequence(
            opened=opened, owner=owner, deadline=deadline, names=names, matcher=matcher, counts=_counts(opened)
        )
        parent = None if opened.fork_of is None else self._sequences.get(opened.fork_of)
        if parent is not None and parent.owner == owner:
            sequence.tokens = parent.tokens[: opened.prompt_length]
        self._sequences[opened.stream_id] = sequence
        return sequence

    def sync(
        self,
        stream_id: int,
        owner: bytes,
        generation: int,
        *,
        base: int,
        tokens: Tokens[int],
        committed: int,
        base_hash: int,
    ) -> Sequence | None:
        """Brings a stream in line with an item and frees the blocks that rejected tokens no longer need.

        Returns:
            The sequence, or None for an item of an older generation, which is to be dropped without an answer.

        Raises:
            UnknownStream: not open, or not this coordinator's.
            InvalidArgument, StaleCache: see `Sequence.sync`.
        """
        sequence = self._sequences.get(stream_id)
        if sequence is None or sequence.owner != owner:
            raise UnknownStream(f"stream {stream_id:016x} is not open here")
        if generation < sequence.generation:
            return None
        sequence.generation = generation
        sequence.sync(base, tokens, committed, base_hash)
        self.kv.trim(sequence)
        return sequence

    def adopt(self, sequence: Sequence, limit: int) -> int:
        """As `SequenceKV.adopt`; a fork copies from its parent while that is open."""
        parent = None if sequence.opened.fork_of is None else self._sequences.get(sequence.opened.fork_of)
        return self.kv.adopt(sequence, limit, parent if parent is not None and parent.owner == sequence.owner else None)

    def close(self, stream_id: int, owner: bytes) -> bool:
        """Ends a stream and frees its blocks; False for one that is not open or not this coordinator's."""
        sequence = self._sequences.get(stream_id)
        if sequence is None or sequence.owner != owner:
            return False
        self._free(sequence)
        return True

    def expire(self) -> list[int]:
        """Ends the streams whose deadline passed or whose owner's lease ended; their ids. Cheap when none is due."""
        now = self._clock()
        if now < self._next_end:
            return []
        gone = self._owners.expire(now)
        due = [s for s in self._sequences.values() if s.deadline <= now or s.owner in gone]
        for sequence in due:
            self._free(sequence)
        self._next_end = min([self._owners.next_end, *(s.deadline for s in self._sequences.values())])
        if due:
            log.info("%d streams ended with their lease or deadline; %d coordinators gone", len(due), len(gone))
        return [sequence.opened.stream_id for sequence in due]

    @property
    def next_end(self) -> float:
        """Clock time before which `expire` has nothing to do."""
        return self._next_end

    def check_integrity(self) -> None:
        """Checks that blocks and streams account for each other.

        Raises:
            RuntimeError: saying which do not.
        """
        self.kv.check_integrity(self._sequences.values())

    def _free(self, sequence: Sequence) -> None:
        self._block_manager.release(sequence.blocks)
        del self._sequences[sequence.opened.stream_id]

    def _ends(self, when: float) -> float:
        self._next_end = min(self._next_end, when)
        return when


def _counts(opened: StreamOpen) -> Counts | None:
    return Counts(opened.prompt_length) if opened.params.penalised else None
