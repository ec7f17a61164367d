"""Which steps a profile measures."""

from __future__ import annotations

from typing import NamedTuple

from outrider.engine.info import ModelInfo

STREAMS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = (1, 2, 3, 5, 9)
CONTEXTS = (128, 1024, 4096)


class Shape(NamedTuple):
    """B streams of n tokens each behind L cached ones each."""

    streams: int
    tokens: int
    context: int


class Bounds(NamedTuple):
    """What may be measured: of the service's configuration."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_slots: int


def shapes(bounds: Bounds, info: ModelInfo, num_blocks: int) -> list[Shape]:
    """What to measure, the most telling first: every batch at the shortest context, then few at longer ones."""
    pool = num_blocks * info.block_size
    found = []
    for context in CONTEXTS:
        streams = STREAMS if context == CONTEXTS[0] else STREAMS[::2]
        tokens = TOKENS if context == CONTEXTS[0] else TOKENS[::3]
        for n in tokens:
            for b in streams:
                fits = b <= bounds.max_num_seqs and b * n <= bounds.max_num_batched_tokens
                room = context + n <= info.max_positions and 2 * b * (context + n + info.block_size) <= pool
                if fits and room and n <= bounds.max_slots + 1:
                    found.append(Shape(b, n, context))
    # A small model may have no room for the contexts above; one token behind one is always possible.
    return found or [Shape(1, 1, 1)]
