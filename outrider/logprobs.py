"""Log-probabilities of tokens, as the target computes them: log-softmax of the raw logits, before any parameter.

A round of m slots brings 2 m + 1 values of single tokens: x_1 .. x_m, the m tokens emitted on rejection, and the bonus,
because only the coordinator knows which of them become text. The most probable ids come by row: m + 1 rows. A prompt of
n tokens brings n - 1 values and rows: those of its second token and of all behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20
"""Alternatives per token that a request may ask for."""

_U64 = NDArray[np.uint64]
_U32 = NDArray[np.uint32]
_F32 = NDArray[np.float32]


class LogprobRows(NamedTuple):
    """Values of some tokens, and the most probable ids at some places.

    Attributes:
        own: float32 [n]; of ids that the target does not have -inf.
        top_ids: uint32 [rows, k], falling by value.
        top: float32 [rows, k].
    """

    own: _F32
    top_ids: _U32
    top: _F32

    def first(self, k: int) -> LogprobRows:
        """The same with at most k tops."""
        return LogprobRows(self.own, self.top_ids[:, :k], self.top[:, :k])

    def emitted(self, m: int, kept: int, k: int) -> LogprobRows:
        """Of a round of m slots, of which k were accepted: its first `kept` emitted tokens, one value and row each."""
        places = [*range(k), m + k][:kept]
        return LogprobRows(self.own[places], self.top_ids[:kept], self.top[:kept])


class LogprobBlock(NamedTuple):
    """What one answer carries; the echo tells the answers of a run apart."""

    stream_id: int
    committed: int
    rows: LogprobRows


def joined(parts: Sequence[LogprobRows]) -> LogprobRows:
    """Consecutive parts as one; at least one."""
    return LogprobRows(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _none() -> _U32:
    return np.empty(0, np.uint32)


def _no_values() -> _F32:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """The blocks of a message, as columns; streams that asked for none have no block.

    Attributes:
        stream_ids: [n] u64.
        committed_lengths: [n] u32, echo of the answer that the block belongs to.
        own_counts: [n] u32, values of a block.
        row_counts: [n] u32, rows of tops of a block.
        widths: [n] u8, tops in each of its rows.
        own: flat f32.
        top_ids: flat u32.
        top: flat f32.
    """

    stream_ids: _U64 = field(default_factory=lambda: np.empty(0, np.uint64))
    committed_lengths: _U32 = field(default_factory=_none)
    own_counts: _U32 = field(default_factory=_none)
    row_counts: _U32 = field(default_factory=_none)
    widths: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    own: _F32 = field(default_factory=_no_values)
    top_ids: _U32 = field(default_factory=_none)
    top: _F32 = field(default_factory=_no_values)

    def __len__(self) -> int:
        return len(self.stream_ids)

    @classmethod
    def of(cls, blocks: Sequence[LogprobBlock]) -> Logprobs:
        """The columns of these blocks."""
        if not blocks:
            return NO_LOGPROBS
        rows = [block.rows for block in blocks]
        return cls(
            stream_ids=np.array([block.stream_id for block in blocks], np.uint64),
            committed_lengths=np.array([block.committed for block in blocks], np.uint32),
            own_counts=np.array([len(part.own) for part in rows], np.uint32),
            row_counts=np.array([len(part.top) for part in rows], np.uint32),
            widths=np.array([part.top.shape[1] for part in rows], np.uint8),
            own=np.concatenate([part.own for part in rows]),
            top_ids=np.concatenate([part.top_ids.reshape(-1) for part in rows]),
            top=np.concatenate([part.top.reshape(-1) for part in rows]),
        )

    def blocks(self) -> Iterator[LogprobBlock]:
        """The blocks, as views into the columns."""
        own_start = top_start = 0
        columns = (self.stream_ids, self.committed_lengths, self.own_counts, self.row_counts, self.widths)
        for stream_id, committed, owns, rows, width in zip(*(column.tolist() for column in columns), strict=True):
            own_end, top_end = own_start + owns, top_start + rows * width
            yield LogprobBlock(
                stream_id,
                committed,
                LogprobRows(
                    self.own[own_start:own_end],
                    self.top_ids[top_start:top_end].reshape(rows, width),
                    self.top[top_start:top_end].reshape(rows, width),
                ),
            )
            own_start, top_start = own_end, top_end

    def by_answer(self) -> dict[tuple[int, int], LogprobRows]:
        """The blocks by stream and committed length."""
        return {(block.stream_id, block.committed): block.rows for block in self.blocks()}


NO_LOGPROBS = Logprobs()
