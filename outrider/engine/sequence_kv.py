"""SequenceKV: which blocks of the pool a sequence has, which of them others may read, and what it gives up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outrider.engine.block_manager import BlockManager, Copy, OutOfBlocks
from outrider.engine.sequence import Sequence

SINK = 4
"""First positions that attention leans on whatever they hold; a windowed stream keeps them."""


@dataclass(slots=True)
class PrefixTokens:
    """Tokens that were looked for among known prefixes since the start, and those of them whose KV was found."""

    asked: int = 0
    found: int = 0


class SequenceKV:
    """The pool as sequences use it; only this edits their tables. Used in the engine thread only.

    Attributes:
        prefix_tokens: what prefix reuse did.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self.prefix_tokens = PrefixTokens()

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        return self._blocks.block_size

    @property
    def sink_tokens(self) -> int:
        """First positions that a windowed stream keeps."""
        return self._blocks.blocks_for(SINK) * self.block_size

    def reserve(self, sequence: Sequence, tokens: int | None = None, *, spare_blocks: int = 0) -> None:
        """Gets blocks for a sequence's first `tokens` tokens (default: all known ones).

        Raises:
            OutOfBlocks: nothing was taken: blocks are lacking, or fewer than `spare_blocks` would stay free.
        """
        wanted = (len(sequence.tokens) if tokens is None else tokens) - sequence.dropped
        missing = self._blocks.missing(sequence.blocks, wanted)
        if missing and missing + spare_blocks > self._blocks.free_blocks:
            raise OutOfBlocks(f"the KV pool has {self._blocks.free_blocks} free blocks, {missing} are needed")
        self._blocks.grow(sequence.blocks, wanted)

    def adopt(self, sequence: Sequence, limit: int, parent: Sequence | None) -> int:
        """Lets a sequence without KV share that of a known prefix; how many of its first `limit` tokens it covers.

        Whole blocks are shared by reference. Of the block behind them a fork gets a copy, as far as its parent's prompt
        reaches; any other stream computes what lies in it.
        """
        names, blocks = sequence.names, self._blocks
        if names is None or sequence.blocks or limit <= 0:
            return 0
        size = blocks.block_size
        found = size * blocks.share(sequence.blocks, names.upto(sequence.tokens, limit // size))
        sequence.shared = sequence.cached = found
        if parent is not None and not parent.dropped:  # a windowed parent's table has gaps
            end = min(limit, parent.cached, parent.committed)
            alike = parent.tokens[found:end] == sequence.tokens[found:end]
            if 0 < end - found < size and alike and blocks.free_blocks:
                blocks.grow(sequence.blocks, end)
                blocks.copy(parent.blocks[found // size], sequence.blocks[-1], end - found)
                sequence.cached = end
        return sequence.cached

    def count_prefix(self, sequence: Sequence, limit: int) -> None:
        """Counts what `adopt` found for a sequence that has got room, of `limit` tokens; one without tries again."""
        if sequence.names is None or limit <= 0:
            return
        self.prefix_tokens.asked += limit
        self.prefix_tokens.found += sequence.cached
        if sequence.prefix_tokens is None:
            sequence.prefix_tokens = sequence.cached

    def take_copies(self) -> list[Copy]:
        """Of KV, to be made before the next step; see `BlockManager.take_copies`."""
        return self._blocks.take_copies()

    def publish(self, sequence: Sequence) -> None:
        """Lets other streams find the blocks that a sequence has filled with committed tokens."""
        names, blocks = sequence.names, self._blocks
        size = blocks.block_size
        filled = min(sequence.cached, sequence.committed) // size
        if names is None or filled <= sequence.shared // size or sequence.dropped:
            return
        fresh = range(sequence.shared // size, filled)
        for index, name in zip(fresh, names.upto(sequence.tokens, filled)[fresh.start :], strict=True):
            blocks.name(sequence.blocks[index], name)
        sequence.shared = filled * size

    def rewind(self, sequence: Sequence, start: int) -> None:
        """Makes the positions from `start` on writable; KV that other streams read is left to them, not to be cut."""
        size = self._blocks.block_size
        if sequence.dropped and start < self.sink_tokens + sequence.dropped:
            self.drop_cache(sequence)
        elif start < sequence.shared:
            first = (start - sequence.dropped) // size
            kept = self._blocks.reclaim(sequence.blocks, first)
            sequence.shared = start // size * size
            sequence.cached = min(sequence.cached, kept * size + sequence.dropped)

    def slide(self, sequence: Sequence, window: int) -> None:
        """Frees the blocks between the first positions and the last `window` cached ones.

        Attention sinks and a sliding window, as in StreamingLLM (Xiao et al., arXiv 2309.17453), but every position
        keeps its own rotation. Of both kinds whole blocks are kept.
        """
        blocks, size = self._blocks, self.block_size
        surplus = (sequence.cached - sequence.dropped - self.sink_tokens - window) // size
        if surplus > 0:
            blocks.cut_out(sequence.blocks, self.sink_tokens // size, surplus)
            sequence.dropped += surplus * size
            # What is in front of the window is never written again, and what lies in it is not to be found by others.
            sequence.shared = max(sequence.shared, self.sink_tokens + sequence.dropped)

    def trim(self, sequence: Sequence) -> None:
        """Frees the blocks behind a sequence's last known token."""
        self.rewind(sequence, sequence.cached)
        held = len(sequence.blocks) * self._blocks.block_size
        self._blocks.truncate(sequence.blocks, min(len(sequence.tokens) - sequence.dropped, held))

    def drop_cache(self, sequence: Sequence) -> None:
        """Frees all blocks of a stream but keeps its tokens: it stays open and is computed again when needed."""
        self._blocks.release(sequence.blocks)
        sequence.cached = sequence.shared = sequence.dropped = 0

    def preempt(self, sequence: Sequence) -> None:
        """Frees all blocks of a stream for another one; as `drop_cache`, and counted."""
        self.drop_cache(sequence)
        sequence.preemptions += 1

    def check_integrity(self, sequences: Collection[Sequence]) -> None:
        """Checks that the blocks and all sequences there are account for each other.

        Raises:
            RuntimeError: saying which do not.
        """
        self._blocks.check_integrity(sequence.blocks for sequence in sequences)
        for sequence in sequences:
            held = len(sequence.blocks) * self.block_size + sequence.dropped
            known = max(sequence.cached, sequence.committed) <= len(sequence.tokens)
            if not (sequence.shared <= sequence.cached <= held and known):
                raise RuntimeError(
                    f"stream {sequence.opened.stream_id:016x}: {sequence.shared} shared, {sequence.cached} cached and "
                    f"{sequence.committed} committed of {len(sequence.tokens)} tokens, blocks for {held}"
                )
            private = (sequence.shared - sequence.dropped) // self.block_size
            self._blocks.check_private(sequence.blocks[private:])
