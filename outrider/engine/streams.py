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
from dataclasses import dataclass

from outrider.engine.block_manager import BlockManager, Copy, OutOfBlocks
from outrider.engine.counts import Counts
from outrider.engine.grammar import Matcher
from outrider.engine.prefix_index import BlockNames
from outrider.engine.sequence import Sequence
from outrider.errors import InvalidArgument, Overloaded, UnknownStream
from outrider.grammar import Grammar
from outrider.planted import Plant
from outrider.seam import StreamOpen

log = logging.getLogger(__name__)

SINK = 4
"""First positions that attention leans on whatever they hold; a windowed stream keeps them."""


@dataclass(slots=True)
class _Owner:
    epoch: int
    lease_end: float
    """Clock time at which the streams go; infinite while the link is up."""


@dataclass(slots=True)
class PrefixTokens:
    """Tokens that were looked for among known prefixes since the start, and those of them whose KV was found."""

    asked: int = 0
    found: int = 0


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
        prefix_tokens: what prefix reuse did.
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
        self._block_manager = block_manager
        self._lease_s = lease_s
        self._clock = clock
        self._max_streams = max_streams
        self._allow_planted_errors = allow_planted_errors
        self._matcher = matcher
        self._sequences: dict[int, Sequence] = {}
        self._owners: dict[bytes, _Owner] = {}
        self._next_end = math.inf
        self.prefix_tokens = PrefixTokens()

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
        known = self._owners.get(owner)
        if known is not None and epoch <= known.epoch:
            raise InvalidArgument("link_epoch", f"{epoch} is not above {known.epoch}, the epoch of a newer link")
        self._owners[owner] = _Owner(epoch, math.inf)

    def is_current(self, owner: bytes, epoch: int) -> bool:
        """Whether messages of this link count; those of an older epoch are to be dropped."""
        known = self._owners.get(owner)
        return known is not None and known.epoch == epoch

    def detach(self, owner: bytes, epoch: int) -> None:
        """A link went down: the lease begins. Ignored if a newer link took over."""
        if self.is_current(owner, epoch):
            self._owners[owner].lease_end = self._ends(self._clock() + self._lease_s)

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
        self.trim(sequence)
        return sequence

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._block_manager.block_size

    @property
    def sink_tokens(self) -> int:
        """First positions that a windowed stream keeps."""
        return self._block_manager.blocks_for(SINK) * self.block_size

    def reserve(self, sequence: Sequence, tokens: int | None = None, *, spare_blocks: int = 0) -> None:
        """Gets blocks for a sequence's first `tokens` tokens (default: all known ones).

        Raises:
            OutOfBlocks: nothing was taken: blocks are lacking, or fewer than `spare_blocks` would stay free.
        """
        wanted = (len(sequence.tokens) if tokens is None else tokens) - sequence.dropped
        missing = self._block_manager.missing(sequence.blocks, wanted)
        if missing and missing + spare_blocks > self._block_manager.free_blocks:
            raise OutOfBlocks(f"the KV pool has {self._block_manager.free_blocks} free blocks, {missing} are needed")
        self._block_manager.grow(sequence.blocks, wanted)

    def adopt(self, sequence: Sequence, limit: int) -> int:
        """Lets a sequence without KV share that of a known prefix; how many of its first `limit` tokens it covers.

        Whole blocks are shared by reference. Of the block behind them a fork gets a copy, as far as its parent's prompt
        reaches; any other stream computes what lies in it.
        """
        names, manager = sequence.names, self._block_manager
        if names is None or sequence.blocks or limit <= 0:
            return 0
        size = manager.block_size
        found = size * manager.share(sequence.blocks, names.upto(sequence.tokens, limit // size))
        sequence.shared = sequence.cached = found
        self.prefix_tokens.asked += limit
        parent = None if sequence.opened.fork_of is None else self._sequences.get(sequence.opened.fork_of)
        if parent is not None and parent.owner == sequence.owner:
            end = min(limit, parent.cached, parent.committed)
            alike = parent.tokens[found:end] == sequence.tokens[found:end]
            if 0 < end - found < size and alike and manager.free_blocks:
                manager.grow(sequence.blocks, end)
                manager.copy(parent.blocks[found // size], sequence.blocks[-1], end - found)
                sequence.cached = end
        self.prefix_tokens.found += sequence.cached
        if sequence.prefix_tokens is None:
            sequence.prefix_tokens = sequence.cached
        return sequence.cached

    def take_copies(self) -> list[Copy]:
        """Of KV, to be made before the next step; see `BlockManager.take_copies`."""
        return self._block_manager.take_copies()

    def publish(self, sequence: Sequence) -> None:
        """Lets other streams find the blocks that a sequence has filled with committed tokens."""
        names, manager = sequence.names, self._block_manager
        size = manager.block_size
        filled = min(sequence.cached, sequence.committed) // size
        if names is None or filled <= sequence.shared // size or sequence.dropped:
            return
        fresh = range(sequence.shared // size, filled)
        for index, name in zip(fresh, names.upto(sequence.tokens, filled)[fresh.start :], strict=True):
            manager.name(sequence.blocks[index], name)
        sequence.shared = filled * size

    def rewind(self, sequence: Sequence, start: int) -> None:
        """Makes the positions from `start` on writable; KV that other streams read is left to them, not to be cut."""
        size = self._block_manager.block_size
        if sequence.dropped and start < self.sink_tokens + sequence.dropped:
            self.drop_cache(sequence)
        elif start < sequence.shared:
            first = (start - sequence.dropped) // size
            kept = self._block_manager.reclaim(sequence.blocks, first)
            sequence.shared = start // size * size
            sequence.cached = min(sequence.cached, kept * size + sequence.dropped)

    def slide(self, sequence: Sequence, window: int) -> None:
        """Frees the blocks between the first positions and the last `window` cached ones.

        Attention sinks and a sliding window, as in StreamingLLM (Xiao et al., arXiv 2309.17453), but every position
        keeps its own rotation. Of both kinds whole blocks are kept.
        """
        manager, size = self._block_manager, self.block_size
        surplus = (sequence.cached - sequence.dropped - self.sink_tokens - window) // size
        if surplus > 0:
            manager.cut_out(sequence.blocks, self.sink_tokens // size, surplus)
            sequence.dropped += surplus * size
            # What is in front of the window is never written again, and what lies in it is not to be found by others.
            sequence.shared = max(sequence.shared, self.sink_tokens + sequence.dropped)

    def trim(self, sequence: Sequence) -> None:
        """Frees the blocks behind a sequence's last known token."""
        self.rewind(sequence, sequence.cached)
        held = len(sequence.blocks) * self._block_manager.block_size
        self._block_manager.truncate(sequence.blocks, min(len(sequence.tokens) - sequence.dropped, held))

    def drop_cache(self, sequence: Sequence) -> None:
        """Frees all blocks of a stream but keeps its tokens: it stays open and is computed again when needed."""
        self._block_manager.release(sequence.blocks)
        sequence.cached = sequence.shared = sequence.dropped = 0

    def preempt(self, sequence: Sequence) -> None:
        """Frees all blocks of a stream for another one; as `drop_cache`, and counted."""
        self.drop_cache(sequence)
        sequence.preemptions += 1

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
        gone = {owner for owner, state in self._owners.items() if state.lease_end <= now}
        due = [s for s in self._sequences.values() if s.deadline <= now or s.owner in gone]
        for sequence in due:
            self._free(sequence)
        for owner in gone:
            del self._owners[owner]
        ends = [state.lease_end for state in self._owners.values()]
        self._next_end = min([*ends, *(s.deadline for s in self._sequences.values())], default=math.inf)
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
        self._block_manager.check_integrity(sequence.blocks for sequence in self)
        for sequence in self:
            held = len(sequence.blocks) * self._block_manager.block_size + sequence.dropped
            known = max(sequence.cached, sequence.committed) <= len(sequence.tokens)
            if not (sequence.shared <= sequence.cached <= held and known):
                raise RuntimeError(
                    f"stream {sequence.opened.stream_id:016x}: {sequence.shared} shared, {sequence.cached} cached and "
                    f"{sequence.committed} committed of {len(sequence.tokens)} tokens, blocks for {held}"
                )
            private = (sequence.shared - sequence.dropped) // self._block_manager.block_size
            self._block_manager.check_private(sequence.blocks[private:])

    def _free(self, sequence: Sequence) -> None:
        self._block_manager.release(sequence.blocks)
        del self._sequences[sequence.opened.stream_id]

    def _ends(self, when: float) -> float:
        self._next_end = min(self._next_end, when)
        return when


def _counts(opened: StreamOpen) -> Counts | None:
    return Counts(opened.prompt_length) if opened.params.penalised else None
