"""Features: hidden states of the target that a draft builds on (EAGLE-3, MTP), as bytes that nobody between parses.

Row t is what the target computed while it read token t, so it depends on tokens 0 .. t only and holds for as long as
they are committed. A row is the input of some decoder layers, or the output behind the last, side by side, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NOT_WANTED = 2**32 - 1
"""In a column of first wanted positions: no features are wanted."""

ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """Which hidden states a draft builds on.

    Attributes:
        layers: decoder layers whose input is taken (an index = layers that ran before it); the number of all layers
            means what the target's final norm makes of the last one's output.
        window: positions that the draft looks back at most.
    """

    layers: tuple[int, ...]
    window: int

    def row_bytes(self, hidden: int) -> int:
        """Bytes of one row of a target whose hidden states are `hidden` wide."""
        return len(self.layers) * hidden * ELEMENT_BYTES


class FeatureBlock(NamedTuple):
    """Rows for consecutive positions of one stream.

    Attributes:
        first: position of the first row.
        rows: uint8 [rows, row bytes].
    """

    first: int
    rows: NDArray[np.uint8]

    @property
    def end(self) -> int:
        """Position behind the last row."""
        return self.first + len(self.rows)

    def before(self, end: int) -> FeatureBlock:
        """The rows of positions below `end`, as a view."""
        return FeatureBlock(self.first, self.rows[: max(end - self.first, 0)])


def _none() -> NDArray[np.uint32]:
    return np.empty(0, np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The blocks of a message, as columns.

    Attributes:
        stream_ids: [n] u64.
        first_positions: [n] u32, position of a block's first row.
        row_counts: [n] u32.
        row_bytes: [n] u32, bytes of each row of a block.
        rows: flat u8.
    """

    stream_ids: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    first_positions: NDArray[np.uint32] = field(default_factory=_none)
    row_counts: NDArray[np.uint32] = field(default_factory=_none)
    row_bytes: NDArray[np.uint32] = field(default_factory=_none)
    rows: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def __len__(self) -> int:
        return len(self.stream_ids)

    @classmethod
    def of(cls, blocks: Sequence[tuple[int, FeatureBlock]]) -> Features:
        """The columns of these (stream id, block) pairs."""
        if not blocks:
            return NO_FEATURES
        return cls(
            stream_ids=np.array([stream_id for stream_id, _ in blocks], np.uint64),
            first_positions=np.array([block.first for _, block in blocks], np.uint32),
            row_counts=np.array([len(block.rows) for _, block in blocks], np.uint32),
            row_bytes=np.array([block.rows.shape[1] for _, block in blocks], np.uint32),
            rows=np.concatenate([block.rows.reshape(-1) for _, block in blocks]),
        )

    def blocks(self) -> Iterator[tuple[int, FeatureBlock]]:
        """(stream id, block) pairs, as views into the columns."""
        start = 0
        columns = (self.stream_ids, self.first_positions, self.row_counts, self.row_bytes)
        for stream_id, first, count, width in zip(*(column.tolist() for column in columns), strict=True):
            end = start + count * width
            yield stream_id, FeatureBlock(first, self.rows[start:end].reshape(count, width))
            start = end


NO_FEATURES = Features()
