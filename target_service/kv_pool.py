"""KV room by stream id, as the scheduler asks for it."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.block_manager import BlockManager
from outrider.engine.formation import Work
from outrider.engine.streams import Streams
from target_service.item import Stream


class KVPool:
    """The block manager behind the scheduler's `Pool`.

    Args:
        block_manager: of the model's KV.
        streams: of the service.
        known: the stream of an id.
    """

    def __init__(self, block_manager: BlockManager, streams: Streams, known: Callable[[int], Stream]) -> None:
        self._block_manager = block_manager
        self._streams = streams
        self._known = known

    def fits(self, *tokens: int) -> bool:
        return sum(map(self._block_manager.blocks_for, tokens)) <= self._block_manager.num_blocks

    def admit(self, stream_id: int, work: Work, spare_blocks: int) -> int | None:
        sequence = self._known(stream_id).sequence
        # A draft needs the features of the last positions, and a scored prompt the logits of all of them.
        kept_back = work.tokens if work.scored else self._known(stream_id).feature_window
        limit = work.tokens - work.tail - kept_back
        found = self._streams.adopt(sequence, limit)
        if self.grow(stream_id, work.tokens, spare_blocks):
            self._streams.kv.count_prefix(sequence, limit)
            return found
        self._streams.kv.drop_cache(sequence)
        return None

    def grow(self, stream_id: int, tokens: int, spare_blocks: int) -> bool:
        sequence = self._known(stream_id).sequence
        missing = self._block_manager.missing(sequence.blocks, tokens)
        if not missing:
            return True
        if missing + spare_blocks > self._block_manager.free_blocks:
            return False
        self._streams.kv.reserve(sequence, tokens)
        return True

    def release(self, stream_id: int) -> None:
        stream = self._known(stream_id)
        self._streams.kv.preempt(stream.sequence)
        if stream.prompt is not None and stream.scores_prompt:
            stream.prompt.restart()
