"""KV room for drafting: which stream gets blocks, at whose cost, and what a windowed draft lets go of.

The draft's pool is a budget of its own. A stream that there is no room for is answered RESOURCE_EXHAUSTED with nothing
taken, decodes plainly, and asks again later; those that are drafting keep a block each to grow into. Streams that have
been idle for a while give way, each once: a second time it would only take turns with those that took its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from draft_service.job import Job
from outrider.engine.block_manager import OutOfBlocks
from outrider.engine.sequence import Sequence
from outrider.engine.streams import Streams

_IDLE_S = 1.0
"""A stream without an item for this long may lose its KV to another; sooner, streams would take turns in robbing."""
_REMEMBERED = 64
"""Notes on streams that have ended are dropped when there are so many more of them than twice the streams."""


class KVRoom:
    """Hands out KV blocks. Used in the engine thread only.

    Args:
        streams: with the pool behind them.
        jobs: outstanding items, whose streams are not idle.
        max_model_len: positions that a stream may have.
        piece: rows of one stream in a step at most.
        window: last positions whose KV is kept, beside the first few; None keeps all.

    Attributes:
        evictions: how often an idle stream lost its KV to another.
    """

    def __init__(
        self, streams: Streams, jobs: Mapping[int, Job], *, max_model_len: int, piece: int, window: int | None = None
    ) -> None:
        self._streams = streams
        self._jobs = jobs
        self._window = window
        # A block that holds a whole stream never has to be followed by another.
        self._grows = streams.kv.block_size < max_model_len
        self._most = math.inf if window is None else window + streams.kv.sink_tokens + streams.kv.block_size + piece
        self._last_active: dict[int, float] = {}
        self._robbed: set[int] = set()
        self.evictions = 0

    def enter(self, job: Job, sequence: Sequence, now_s: float) -> bool:
        """Room for all that a job will feed, for a stream that holds nothing; known prefixes are shared."""
        limit = len(sequence.tokens) - max(min(job.wanted, 1), 1)
        self._streams.adopt(sequence, limit)
        spare = sum(1 for other in self._streams if other.blocks and other is not sequence) if self._grows else 0
        tokens = min(len(sequence.tokens) + job.wanted, self._most) if self._grows else len(sequence.tokens)
        if self.extend(sequence, int(tokens), now_s, spare=spare):
            self._streams.kv.count_prefix(sequence, limit)
            return True
        self._streams.kv.drop_cache(sequence)
        return False

    def extend(self, sequence: Sequence, tokens: int, now_s: float, *, spare: int = 0) -> bool:
        """Blocks for a stream's first `tokens` tokens, if need be at the cost of one that has long been idle."""
        while True:
            try:
                self._streams.kv.reserve(sequence, tokens, spare_blocks=spare)
                return True
            except OutOfBlocks:
                if not self._rob(sequence, now_s):
                    return False

    def slide(self, sequence: Sequence) -> None:
        """Lets go of what lies between the first few positions and the window, once it has been fed."""
        if self._window is not None:
            self._streams.kv.slide(sequence, self._window)

    def left(self, stream_id: int, now_s: float) -> None:
        """A job of the stream was answered; from now on it is idle."""
        self._last_active[stream_id] = now_s
        if len(self._last_active) > 2 * len(self._streams) + _REMEMBERED:
            self._last_active = {key: when for key, when in self._last_active.items() if key in self._streams}
            self._robbed = {key for key in self._robbed if key in self._streams}

    def _rob(self, beneficiary: Sequence, now_s: float) -> bool:
        """Frees the KV of the stream that has been idle longest; False if none has been for long enough."""
        idle = [
            (self._last_active.get(stream_id, -math.inf), other)
            for other in self._streams
            if other.blocks
            and other is not beneficiary
            and (stream_id := other.opened.stream_id) not in self._jobs
            and stream_id not in self._robbed
        ]
        last_active, victim = min(idle, key=lambda entry: entry[0], default=(math.inf, beneficiary))
        if victim is beneficiary or now_s - last_active < _IDLE_S:
            return False
        self._streams.kv.preempt(victim)
        self._robbed.add(victim.opened.stream_id)
        self.evictions += 1
        return True
