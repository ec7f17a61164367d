"""One step's ragged batch: the new tokens of all scheduled streams in a single row, described once for every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.engine.config import KEY_BLOCK
from outrider.engine.span import Span as Span

# Above this many rows the count is padded to one of eight sizes per octave, so that the start-up test can try them all.
EXACT_ROWS = 64
# Segments up to this long share one attention call with segments of other streams; longer ones get a call of their own.
SHARED_SEGMENT = 32


class RowRule(NamedTuple):
    """Row counts at which a matrix product gives each row the same bits: a multiple, and no fewer than the minimum."""

    minimum: int
    multiple: int

    def pad(self, rows: int) -> int:
        """The smallest row count >= `rows` that obeys the rule and is one of the tested sizes."""
        padded = round_up(max(rows, self.minimum), self.multiple)
        if padded <= EXACT_ROWS:
            return padded
        return round_up(padded, max(self.multiple, 1 << (padded.bit_length() - 4)))

    def sizes(self, limit: int) -> Iterator[int]:
        """Every padded row count up to `limit`, ascending."""
        size = 0
        while (size := self.pad(size + 1)) <= limit:
            yield size


class Segment(NamedTuple):
    """Rows of one span whose positions lie in one block of `KEY_BLOCK` keys; all attend over `keys` keys."""

    span: int
    row: int
    rows: int
    position: int
    keys: int


class RowGroup(NamedTuple):
    """Segments that share an attention call.

    Attributes:
        keys: KV length of the call, a multiple of `KEY_BLOCK`.
        rows: [streams, n] row of each query; a stream with fewer than n rows repeats its last.
        positions: [streams, n] position of each query.
        blocks: [streams * keys / block_size] KV blocks, the scratch block where a stream has none.
    """

    keys: int
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    blocks: NDArray[np.int64]


@dataclass(slots=True)
class RaggedBatch:
    """Everything a forward pass needs besides weights and KV.

    Attributes:
        spans: The spans, in row order.
        tokens: Number of real rows; the rest up to `rows` is padding that writes to the scratch block.
        rows: Padded number of rows.
        ids: [rows].
        positions: [rows] in the text, which is what a row's rotation depends on. All else counts places in the KV.
        slots: [rows] index of each row's KV slot (block * block_size + offset).
        new_blocks: Blocks whose first slot is written in this step.
        wanted: [padded] rows whose logits are wanted, in span order; the padding repeats the first.
        wanted_count: How many of them are real.
        layouts: What attention layers derive from this batch, kept for the layers that follow.
    """

    spans: Sequence[Span]
    block_size: int
    scratch_block: int
    tokens: int
    rows: int
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    new_blocks: list[int]
    wanted: NDArray[np.int64]
    wanted_count: int
    layouts: dict[Any, Any] = field(default_factory=dict)

    def segments(self) -> list[Segment]:
        """Splits the spans where their positions cross a multiple of `KEY_BLOCK`."""
        found = []
        row = 0
        for index, span in enumerate(self.spans):
            position = span.start - span.dropped
            end = position + len(span.tokens)
            while position < end:
                keys = (position // KEY_BLOCK + 1) * KEY_BLOCK
                rows = min(end, keys) - position
                found.append(Segment(index, row, rows, position, keys))
                position += rows
                row += rows
        return found

    def groups(self) -> list[RowGroup]:
        """Collects segments of equal key length and similar size.

        The key length depends on a row's own position only, so the call a row takes part in has the same shape for
        that row whatever rides beside it (exactness needs this; any other common length would break it).
        """
        shared: dict[tuple[int, int], list[Segment]] = {}
        groups = []
        for segment in self.segments():
            if segment.rows > SHARED_SEGMENT:
                groups.append(self._group([segment]))
            else:
                size = 1 << max(2, (segment.rows - 1).bit_length())
                shared.setdefault((segment.keys, size), []).append(segment)
        groups.extend(self._group(segments) for segments in shared.values())
        return groups

    def _group(self, segments: Sequence[Segment]) -> RowGroup:
        keys = segments[0].keys
        last = np.array([segment.rows - 1 for segment in segments])[:, None]
        offsets = np.minimum(np.arange(int(last.max()) + 1)[None, :], last)
        blocks = np.full((len(segments), keys // self.block_size), self.scratch_block, dtype=np.int64)
        for index, segment in enumerate(segments):
            used = -(-(segment.position + segment.rows) // self.block_size)
            blocks[index, :used] = self.spans[segment.span].blocks[:used]
        return RowGroup(
            keys,
            np.array([segment.row for segment in segments])[:, None] + offsets,
            np.array([segment.position for segment in segments])[:, None] + offsets,
            blocks.reshape(-1),
        )


def build_batch(spans: Sequence[Span], *, block_size: int, scratch_block: int, rule: RowRule) -> RaggedBatch:
    """Lays out the spans of one step.

    Args:
        spans: At least one span, each with at least one token.
        block_size: Tokens per KV block.
        scratch_block: Block that padding rows write to.
        rule: Row counts to pad to.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    new_blocks: list[int] = []
    for span in spans:
        end = span.start + len(span.tokens)
        ids.extend(span.tokens)
        positions.extend(range(span.start, end))
        blocks = span.blocks
        first, last = span.start - span.dropped, end - span.dropped
        slots.extend(blocks[p // block_size] * block_size + p % block_size for p in range(first, last))
        new_blocks.extend(blocks[p // block_size] for p in range(round_up(first, block_size), last, block_size))
        wanted.extend(range(len(ids) - span.wanted, len(ids)))
    tokens = len(ids)
    rows = rule.pad(tokens)
    padding = rows - tokens
    wanted_count = len(wanted)
    if wanted:
        wanted.extend(wanted[:1] * (rule.pad(wanted_count) - wanted_count))
    return RaggedBatch(
        spans=spans,
        block_size=block_size,
        scratch_block=scratch_block,
        tokens=tokens,
        rows=rows,
        ids=np.array(ids + [0] * padding, dtype=np.int64),
        positions=np.array(positions + [0] * padding, dtype=np.int64),
        slots=np.array(slots + [scratch_block * block_size] * padding, dtype=np.int64),
        new_blocks=new_blocks,
        wanted=np.array(wanted, dtype=np.int64),
        wanted_count=wanted_count,
    )


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple
